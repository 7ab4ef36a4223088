"""A small deterministic engine for tests of clients and of the server; no model, no torch.

Greedy requests repeat their prompt; sampled ones draw letters from their seed. It has slots, a queue bound and
counted blocks like the real one, so that leaks show.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.engine.client import CacheHit, EngineInfo, Output, RequestTiming, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.messages import BlockNews
from headway.engine.published import Published
from headway.errors import ConfigError, Overloaded, RequestError
from headway.values.plan import Emission, TokenLogprob

EOS = 0
TIMING = RequestTiming(0.0005, 0.0015, 0.004, prefill_s=0.001, decode_s=0.002, preempted_s=0.0005)


@dataclass(eq=False)
class Row:
    submit: Submit
    tokens: list[int] = field(default_factory=list)


class EchoEngine:
    """Every request ends with one terminal output; `blocks_free == num_blocks` when none is left."""

    def __init__(
        self,
        *,
        max_model_len: int = 512,
        vocab_size: int = 320,
        num_blocks: int = 4096,
        slots: int = 64,
        max_waiting: int = 256,
        eos_after: int | None = None,
        hold_after: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = EngineInfo("echo", max_model_len, vocab_size, 16, num_blocks, slots, (EOS,))
        self.submits: list[Submit] = []
        self.aborts: list[tuple[int, str]] = []
        self.is_closed = False
        self._max_waiting = max_waiting
        self._eos_after = eos_after
        self.published: Published | None = None  # what it says about waiting times after each step
        self._hold_after = hold_after  # a row with so many tokens makes no more: only an abort ends it
        self._on_step = on_step
        self._running: dict[int, Row] = {}
        self._waiting: dict[int, Row] = {}
        self._stats = {"steps": 0, "computed": 0, "generated": 0}
        self._finished: dict[str, int] = {}
        self.announced_s = 0.001
        self.num_prepared, self.num_unprepared = 0, 0  # things that it can do ahead
        self._told: Callable[[float], None] = lambda _: None
        self.settings: Settings = {"max_num_seqs": slots, "target_itl_ms": None, "beta": 20.0}

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_steps(self) -> int:
        return self._stats["steps"]

    def announce(self, told: Callable[[float], None]) -> None:
        self._told = told

    def add(self, submit: Submit) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait already; retry later")
        if (submit.num_prompt or len(submit.tokens)) + submit.params.max_tokens > self.info.max_model_len:
            raise RequestError("too long for the engine", param="max_tokens", code="context_length_exceeded")
        self.submits.append(submit)
        num_prompt = submit.num_prompt or len(submit.tokens)
        self._waiting[submit.id] = Row(submit, list(submit.tokens[num_prompt:]))

    def watch_blocks(self) -> BlockNews:
        return BlockNews(is_whole=True)

    def block_news(self) -> BlockNews | None:
        return None  # it caches nothing

    def explain(self, id: int) -> Explanation | None:
        return None

    def look_up(self, submit: Submit) -> CacheHit:
        return CacheHit(len(submit.tokens), 0)

    def abort(self, id: int, reason: str = "abort") -> Output | None:
        row = self._running.pop(id, None) or self._waiting.pop(id, None)
        if row is None:
            return None
        self.aborts.append((id, reason))
        return self._end(row, reason)

    def step(self) -> Emission[Output]:
        self._told(self.announced_s)
        self._on_step()
        self._stats["steps"] += 1
        while self._waiting and len(self._running) < self.info.max_num_seqs:
            id = next(iter(self._waiting))
            self._running[id] = self._waiting.pop(id)
            self._stats["computed"] += len(self._running[id].submit.tokens)
        ids: list[int] = []
        tokens: list[int] = []
        outputs: list[Output] = []
        logprobs: dict[int, list[TokenLogprob]] = {}
        if self._running and all(len(row.tokens) == self._hold_after for row in self._running.values()):
            time.sleep(0.001)
        for id, row in list(self._running.items()):
            if len(row.tokens) == self._hold_after:
                continue
            params = row.submit.params
            token = self._advance(row)
            ids.append(id)
            tokens.append(token)
            if params.logprobs is not None:
                logprobs[id] = [TokenLogprob(-0.5, tuple((token + i, -0.5 - i) for i in range(params.logprobs)))]
            is_stop = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
            if is_stop or len(row.tokens) >= params.max_tokens:
                del self._running[id]
                outputs.append(self._end(row, "stop" if is_stop else "length"))
        return Emission(ids, tokens, outputs, logprobs)

    def prepare(self) -> bool:
        self.num_prepared += self.num_unprepared > 0
        self.num_unprepared = max(0, self.num_unprepared - 1)
        return self.num_unprepared > 0

    def news(self) -> Published | None:
        return self.published

    def stats(self) -> Stats:
        used = sum(1 + (len(row.submit.tokens) + len(row.tokens)) // 16 for row in self._running.values())
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self.info.num_blocks,
            blocks_free=self.info.num_blocks - used,
            tokens_computed=self._stats["computed"],
            tokens_generated=self._stats["generated"],
            steps=self._stats["steps"],
            finished=dict(self._finished),
        )

    def reconfigure(self, changes: Settings) -> Settings:
        for name in changes:
            if name not in self.settings:
                raise ConfigError(f"{name!r} is no setting; allowed: {', '.join(self.settings)}")
        self.settings = {**self.settings, **changes}
        return self.settings

    def close(self) -> None:
        self.is_closed = True

    def _advance(self, row: Row) -> int:
        params, prompt = row.submit.params, row.submit.tokens[: row.submit.num_prompt or None]
        at = len(row.tokens)
        if self._eos_after is not None and at == self._eos_after and not params.ignore_eos:
            token = EOS
        elif params.is_greedy:
            token = prompt[at % len(prompt)]
        else:
            # Lower-case letters of a byte-level vocabulary whose ids are 1 + the byte.
            token = 1 + random.Random(row.submit.seed * 1_000_003 + at).randrange(97, 97 + 26)
        row.tokens.append(token)
        self._stats["generated"] += 1
        return token

    def _end(self, row: Row, finish: str) -> Output:
        self._finished[finish] = self._finished.get(finish, 0) + 1
        return Output(row.submit.id, finish=finish, cached_tokens=3, timing=TIMING)
