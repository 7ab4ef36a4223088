"""A ledger that merely counts: no blocks, no tables, no prefix index. What the scheduler must be content with."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.memory import Ledger
from headway.core.request import Request
from headway.values.plan import Grow


class CountingLedger(Ledger):
    """`held` is how many blocks each request has; nothing says which."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size, self.held = num_blocks, block_size, dict[int, int]()

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def can_ever_hold(self, req: Request) -> bool:
        return self._blocks(req.max_computed) <= self.num_blocks

    def could_adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        return self._needs(req, reserves) + spare <= self.num_free

    def adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        if not self.could_adopt(req, spare, reserves):
            return False
        self.held[req.id] = self._needs(req, reserves)
        return True

    def ensure(self, req: Request, start: int, end: int) -> Sequence[Grow] | None:
        missing = max(0, self._blocks(end) - self.held[req.id])
        if missing > self.num_free:
            return None
        self.held[req.id] += missing
        return []

    def free(self, req: Request) -> Sequence[bytes]:
        self.held.pop(req.id, None)
        req.num_computed = 0
        return ()

    def num_alone(self, req: Request, num_tokens: int) -> int:
        return num_tokens

    def _needs(self, req: Request, reserves: bool) -> int:
        return self._blocks(max(len(req.tokens), req.max_computed if reserves else 0))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
