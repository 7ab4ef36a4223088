"""`Ledger`: what the scheduler knows of KV memory. It asks by request and never for a block's place, state or content.

`KVLedger` serves. One that merely counts blocks needs the first part alone: what comes after `num_alone` has an answer
for ledgers without prefix cache, host memory, draft tokens and KV from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.core.request import Request
from headway.values.plan import BlockCopy, Grow


class Ledger(Protocol):
    """All or nothing, and freed requests leave all blocks free. `adopt` sets what is `num_computed`, `free` sets 0."""

    block_size: int
    num_blocks: int
    num_reserved: int = 0  # blocks set aside for running requests
    caching: bool = False  # full blocks are published, and requests with the same prefix share them

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""

    def can_ever_hold(self, req: Request) -> bool:
        """True if the request fits when it is alone."""

    def could_adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        """What `adopt` would say."""

    def adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        """Give the request a table for all its known tokens, the cached prefix shared, the rest private.

        False, and nothing touched, if that would leave fewer than `spare` blocks. At least one token stays to compute:
        if all are cached, the last block is copied. With `reserves` every block that it can ever need is set aside.
        """

    def ensure(self, req: Request, start: int, end: int) -> Sequence[Grow] | None:
        """Make tokens start..end-1 writable: grow the table, copy what is shared. None, nothing touched: no room."""

    def free(self, req: Request) -> Sequence[bytes]:
        """Take everything back; what was computed may stay in the cache. Returns the keys that this publishes."""

    def num_alone(self, req: Request, num_tokens: int) -> int:
        """Of its first `num_tokens`, those in blocks that no other request uses: what a preemption would lose."""

    @property
    def num_idle(self) -> int:
        """Free blocks whose content is worth keeping."""
        return 0

    def num_cached(self, req: Request) -> int:
        """Blocks of the longest prefix of its known tokens that the cache holds."""
        return 0

    def publish(self, req: Request) -> Sequence[bytes]:
        """Index the full blocks below `num_computed` whose keys are known; returns those keys."""
        return ()

    def fork(self, leader: Request, follower: Request, num_tokens: int, reserves: bool = False) -> bool:
        """Share the leader's first `num_tokens` with the follower. False, nothing touched: no room."""
        return False

    def trim(self, req: Request, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens`: drafts that were not accepted. What was reserved stays reserved."""

    def receive(self, req: Request) -> bool:
        """Give a loading request a table: what the cache has shared, for the rest blocks that no plan in flight and no
        queued copy names."""
        return False

    def blocks_of(self, keys: Sequence[bytes]) -> Sequence[int]:
        """The blocks of the leading keys that the cache has; until the next call of the ledger."""
        return ()

    def block_of(self, key: bytes) -> int | None:
        """The block of this key, whether those before it are there or not."""
        return None

    def hold(self, req: Request, blocks: Sequence[int]) -> None:
        """Let a request that computes nothing read these blocks until it is freed: those before the first reserved."""

    def swap_out(self, req: Request) -> Sequence[bytes] | None:
        """Move the KV of computed tokens to host memory; the keys published by that. None, nothing touched: no room."""
        return None

    def drain(self, plan: int) -> tuple[list[BlockCopy], list[int]]:
        """The copies that this plan must run first, and blocks whose content was given up; some are taken again."""
        return [], []

    def plan_collected(self, plan: int) -> None:
        """Every plan up to this one has run: what they named last is settled."""
