"""A real `headway serve` in which marked requests fail at a chosen place: for `tools/chaos.py` and tests only.

headway itself has no such hooks. They are patched in here, and only if HEADWAY_TEST_FAULTS is 1 as well. A request is
marked by a logit bias for the token `MARK`; the bias says where it fails, by its place in `SEAMS`.

    HEADWAY_TEST_FAULTS=1 python tools/faulty_server.py '{"engine": {"model": "…"}, "server": {"port": 0}}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.values.params import SamplingParams

VARIABLE = "HEADWAY_TEST_FAULTS"
MARK = 5  # a token id of every vocabulary
SEAMS = ("admit", "queue", "forward", "decode", "sample", "mask", "detokenize", "stream", "crash", "hang")
LATE = 3  # tokens after which a decoding row fails


def bias_for(seam: str) -> dict[str, float]:
    """The `logit_bias` of a request that fails there."""
    return {str(MARK): (1 + SEAMS.index(seam)) / 100}


def seam_of(params: SamplingParams) -> str | None:
    bias = params.logit_bias.get(MARK)
    return None if bias is None else SEAMS[round(bias * 100) - 1]


def fail(seam: str) -> None:
    raise RuntimeError(f"told to fail at {seam}")


def patch_engine() -> None:
    """Faults of the engine process."""
    from headway.core.waiting import WaitingQueue
    from headway.engine.engine import Engine
    from headway.runner import executor

    Engine.add = _failing(Engine.add, "admit", lambda _, submit: [submit.params])  # type: ignore[method-assign]
    WaitingQueue.push = _failing(WaitingQueue.push, "queue", lambda _, req, *__: [req.params])  # type: ignore[method-assign]
    worker = executor._Worker
    worker._compute = _failing(worker._compute, "forward", _computed)  # type: ignore[method-assign]
    worker._compute = _failing(worker._compute, "decode", _late)  # type: ignore[method-assign]
    worker._compute = _failing(worker._compute, "crash", _late, _crash)  # type: ignore[method-assign]
    worker._compute = _failing(worker._compute, "hang", _late, _hang)  # type: ignore[method-assign]
    executor.sample = _failing(executor.sample, "sample", _sampled)  # type: ignore[attr-defined]
    executor.CpuExecutor.submit = _masking(executor.CpuExecutor.submit)  # type: ignore[method-assign]


def _failing(
    inner: Callable[..., Any],
    seam: str,
    concerned: Callable[..., list[SamplingParams]],
    how: Callable[[str], None] = fail,
) -> Callable[..., Any]:
    """As `inner`, but `how` is called first if a request that it concerns is marked for this seam."""

    def call(*args: Any) -> Any:
        if any(seam_of(params) == seam for params in concerned(*args)):
            how(seam)
        return inner(*args)

    return call


def _params(slots: Any, rows: Iterable[int], least: int = 0) -> list[SamplingParams]:
    """Of the requests in these rows that have so many tokens of output."""
    found = [(row, slots._requests[row]) for row in rows]
    return [request.params for row, request in found if slots.known[row] >= request.num_prompt + least]


def _computed(worker: Any, inputs: Any, *_: Any) -> list[SamplingParams]:
    return _params(worker._slots, [*inputs.rows.tolist(), *(chunk.row for chunk in inputs.computed)])


def _late(worker: Any, inputs: Any, *_: Any) -> list[SamplingParams]:
    return _params(worker._slots, inputs.rows.tolist(), LATE)


def _sampled(logits: Any, index: Any, rows: Any, positions: Any, slots: Any, *_: Any) -> list[SamplingParams]:
    return _params(slots, rows.tolist())


def _crash(seam: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(seam: str) -> None:
    time.sleep(3600)


def _masking(inner: Callable[..., None]) -> Callable[..., None]:
    """Rows that are marked for it get a mask that is too short."""
    marked: set[int] = set()

    def submit(executor: Any, plan: Any) -> None:
        from headway.engine.executor import Late

        for join in plan.joins:
            (marked.add if seam_of(join.params) == "mask" else marked.discard)(join.row)
        masks = tuple((row, b"\x01") for row in plan.sampling_rows() if row in marked)
        if masks:
            executor.supply(plan.id, Late(masks=masks))
        inner(executor, plan)

    return submit


def patch_server() -> None:
    """Faults of the process that speaks HTTP."""
    from headway.serve.answer import ServedAnswer
    from headway.serve.sse import Events

    params_of: dict[int, SamplingParams] = {}  # by id of an answer

    def marking_init(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, index: int, id: int, params: SamplingParams, *more: Any) -> None:
            inner(self, index, id, params, *more)
            params_of[id] = params

        return init

    def concerned(answer: Any) -> list[SamplingParams]:
        return [params_of[answer.id]] if answer.num_tokens >= LATE else []

    ServedAnswer.__init__ = marking_init(ServedAnswer.__init__)  # type: ignore[method-assign]
    ServedAnswer.push = _failing(ServedAnswer.push, "detokenize", lambda answer, _: concerned(answer))  # type: ignore[method-assign]
    Events._write = _failing(Events._write, "stream", lambda _, answer, __: concerned(answer))  # type: ignore[method-assign]


def main() -> int:
    if os.environ.get(VARIABLE) != "1":
        print(f"faulty_server: set {VARIABLE}=1 to start a server that fails on purpose", file=sys.stderr)
        return 2
    if sys.argv[1].startswith("--fd"):
        from headway.cli.engine_child import main as engine_main

        patch_engine()
        return engine_main(sys.argv[1:])
    from headway.serve.run import run

    given = json.loads(sys.argv[1])
    patch_server()
    config = ServeConfig(EngineConfig.of(**given.get("engine", {})), ServerConfig(**given.get("server", {})))
    return run(config, command=(str(Path(__file__)),))


if __name__ == "__main__":
    sys.exit(main())
