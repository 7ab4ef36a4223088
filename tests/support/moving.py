"""An engine over the hashing executor whose KV comes and goes: every token shows whether its KV was right."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hash_engine import Hashing
from hashing import oracle
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.scheduler import Scheduler
from headway.engine.arrivals import BlockSource
from headway.engine.block_log import BlockLog
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.clock import Clock, MonotonicClock
from headway.engine.engine import Engine
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import BlockMover, Keeper
from headway.values.limits import Limits
from headway.values.params import SamplingParams

BLOCK = 4
BLOCK_BYTES = 8 * BLOCK


class Moving:
    """One engine, stepped by hand. `answers` are the tokens of each request so far."""

    def __init__(
        self,
        *,
        tier: Keeper | None = None,
        peers: BlockSource | None = None,
        num_blocks: int = 64,
        depth: int = 1,
        is_late: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or MonotonicClock()
        metrics, blocks = EngineMetrics(self.clock), BlockLog()
        self.ledger = KVLedger(num_blocks, BLOCK, told=blocks)
        self.executor = Hashing(num_blocks, BLOCK, is_late=is_late)
        self.scheduler = Scheduler(self.ledger, Limits(rows=8, tokens=64), Policy(), sink=metrics)
        self.mover = BlockMover(self.scheduler, self.executor, tier=tier, peers=peers)
        blocks.also = self.mover.told
        info = EngineInfo("hash", 400, 257, BLOCK, num_blocks, 8)
        self.engine = Engine(
            self.scheduler, self.executor, info, metrics, self.clock, depth=depth, max_waiting=100, mover=self.mover
        )  # type: ignore[arg-type]
        self.answers: dict[int, list[int]] = {}
        self.ended: dict[int, Output] = {}

    def add(self, id: int, tokens: Sequence[int], max_tokens: int = 3, **more: object) -> None:
        self.answers[id] = []
        self.engine.add(Submit(id, tokens, SamplingParams(max_tokens=max_tokens), **more))  # type: ignore[arg-type]

    def step(self) -> None:
        emission = self.engine.step()
        for id, token in zip(emission.ids, emission.tokens, strict=True):
            self.answers[id].append(token)
        for output in emission.finished:
            assert output.id not in self.ended
            self.ended[output.id] = output
        if emission.idle_s is not None:
            time.sleep(0.0005)

    def run(self, *ids: int) -> None:
        """Step until these have ended, and what was published is stored."""
        left = 20_000
        while not all(id in self.ended for id in ids) or self.mover.has_work:
            self.step()
            left -= 1
            assert left, "no end in sight"

    def is_right(self, id: int, tokens: Sequence[int], max_tokens: int = 3) -> bool:
        return self.answers[id] == oracle(list(tokens), SamplingParams(max_tokens=max_tokens), 0, frozenset())

    @property
    def num_free(self) -> int:
        return self.ledger.num_free
