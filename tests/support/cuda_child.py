"""An engine process over a CUDA executor and a tiny model, whose device is poisoned once: what a supervisor replaces.

The configuration's model names a folder. The first engine of that folder poisons its device after so many steps: on a
real one a kernel writes where nothing is, which makes every later call of the driver fail in this process; where Triton
interprets, calls fail from then on in the same places.
"""

from __future__ import annotations

from pathlib import Path

from cuda_kit import IS_CUDA, LAUNCH, plain_weights, small_spec

# isort: split
# It has said how Triton is to run.
import torch
import triton
import triton.language as tl

from headway.bench.device import make_engine
from headway.cli.engine_child import end, main
from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor

SPEC = small_spec(layers=1)
SIZES = Sizes(num_rows=4, num_blocks=24, max_len=64, max_tokens=32)
POISON_AFTER = 3  # steps


@triton.jit
def _poison(words):
    tl.store(words + (1 << 44), 1)


def poison(executor: CudaExecutor) -> None:
    """Make the device of this process unusable, and say nothing."""
    if IS_CUDA:
        _poison[(1,)](torch.zeros(1, device="cuda"))
        return

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor.graphs.replay = fail  # type: ignore[method-assign]
    executor._is_idle = fail  # type: ignore[method-assign,assignment]


def build(config: EngineConfig) -> Engine:
    executor = make_executor(SPEC, plain_weights(SPEC), SIZES, LAUNCH)
    engine = make_engine(executor, SPEC, SIZES, caching=True, target_itl_ms=None)
    mark = Path(config.model.model) / "poisoned"
    if not mark.exists():
        submit, count = executor.submit, iter(range(1, 1 << 30))

        def poisoning(plan: object) -> None:
            submit(plan)  # type: ignore[arg-type]
            if next(count) == POISON_AFTER:
                mark.touch()
                poison(executor)

        executor.submit = poisoning  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    end(main(build=build))
