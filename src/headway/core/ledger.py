"""Which request owns which blocks: the only caller of `BlockPool`.

    table of a request      [ 7 ][ 3 ][ 9 ][ 4 ]
    tokens                  0..15 16..31 32..47 48..        block_size = 16
    adopted from the cache  ├────────┤                      shared, never written
    reserved                          ├─────────┤           private
    num_computed            ├───────────────┤

A table only grows while its request runs; the one change inside it is copy-on-write. Data moves as `BlockCopy`
commands that the scheduler puts into the plan; the ledger never waits for them, since plans run in order. Only KV from
elsewhere is written outside the plans: `receive` gives it blocks that no uncollected plan and no queued copy names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from headway.core.memory import Ledger
from headway.core.request import Request
from headway.kv.blocks import BlockPool
from headway.kv.prefix import PrefixIndex, extend_keys
from headway.values.plan import BlockCopy, BlockRef, Grow, Tier


class KVLedger(Ledger):
    """Refs of a block = number of tables that contain it; freeing every request brings all refs to zero."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host_blocks: int = 0,
        caching: bool = True,
        names_released: bool = False,
        told: Callable[[bytes, bool], object] | None = None,
    ) -> None:
        self.block_size, self.num_blocks, self.caching, self.num_reserved = block_size, num_blocks, caching, 0
        self.index = PrefixIndex(told)
        self.pool = BlockPool(num_blocks, self.index.forget)
        self.pool.given_up = {} if names_released else None  # plans then say which blocks hold nothing of use
        self.host = BlockPool(host_blocks, lambda _: None)
        self._copies: list[BlockCopy] = []

    @property
    def num_free(self) -> int:
        return self.pool.available

    @property
    def num_idle(self) -> int:
        return self.pool.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, req: Request) -> bool:
        return self.blocks_for(req.max_computed) <= self.num_blocks

    def num_cached(self, req: Request) -> int:
        return len(self.index.find_chain(req.keys)) if self.caching else 0

    def could_adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        return self._adoption(req, spare, self._reservation(req, reserves)) is not None

    def adopt(self, req: Request, spare: int = 0, reserves: bool = False) -> bool:
        reserved = self._reservation(req, reserves)
        hits = self._adoption(req, spare, reserved)
        if hits is None:
            return False
        total = self.blocks_for(len(req.tokens))
        if req.host_table:
            self._swap_in(req, total)
        elif not req.table:  # else its KV was loaded from elsewhere
            self._share(req, hits, total)
        req.is_reserved, req.num_reserved = reserves, reserved
        self.num_reserved += reserved
        return True

    def _adoption(self, req: Request, spare: int, reserved: int) -> list[int] | None:
        """The cached blocks to adopt; None if the others do not fit beside what is to be reserved."""
        if req.table:
            return [] if self._fits([], 0, reserved) else None
        spare += reserved
        total = self.blocks_for(len(req.tokens))
        hits = self.index.find_chain(req.keys) if self.caching and not req.host_table else []
        copies_last = len(hits) * self.block_size == len(req.tokens)
        if self._fits(hits, total - len(hits) + copies_last, spare):
            return hits
        hits = hits[: len(hits) - copies_last]  # no room for the copy: compute the last block anew instead
        return hits if self._fits(hits, total - len(hits), spare) else None

    def _share(self, req: Request, hits: list[int], total: int) -> None:
        copies_last = len(hits) * self.block_size == len(req.tokens)
        self.pool.share(hits)
        fresh = self.pool.take(total - len(hits) + copies_last)
        assert fresh is not None
        req.table, req.published = hits + fresh, len(hits)
        req.num_computed = len(hits) * self.block_size
        if copies_last:
            self._replace(req.table.pop(len(hits) - 1), fresh[0])
            req.num_computed = len(req.tokens) - 1

    def _fits(self, hits: list[int], fresh: int, spare: int) -> bool:
        room = self.pool.available - self.num_reserved - fresh - spare
        return room >= len(hits) or room >= self.pool.num_idle_of(hits)  # an idle block is not free once it is shared

    def _reservation(self, req: Request, reserves: bool) -> int:
        """Blocks beyond those of its known tokens that a request can ever need."""
        return max(0, self.blocks_for(req.max_computed) - self.blocks_for(len(req.tokens))) if reserves else 0

    def _take(self, req: Request, count: int) -> list[int] | None:
        """Blocks for a running request: its own reserved ones first, never those of others."""
        if self.num_reserved:
            if count > self.pool.available - self.num_reserved + req.num_reserved:
                return None
            kept = min(count, req.num_reserved)
            req.num_reserved -= kept
            self.num_reserved -= kept
        return self.pool.take(count)

    def ensure(self, req: Request, start: int, end: int) -> Sequence[Grow] | None:
        first, last, table = start // self.block_size, -(-end // self.block_size), req.table
        if last - first == 1:  # one token, nearly always
            if first == len(table):
                one = self._take(req, 1)
                if one is None:
                    return None
                table += one
                return (Grow(req.row, first, (one[0],)),)
            if self.pool.refs[table[first]] == 1:
                return ()
        shared = [i for i in range(first, min(last, len(req.table))) if self.pool.refs[req.table[i]] > 1]
        missing = max(0, last - len(req.table))
        if not shared and not missing:
            return []
        taken = self._take(req, len(shared) + missing)
        if taken is None:
            return None
        grows = []
        for index in shared:
            own = taken.pop()
            self._replace(req.table[index], own)
            req.table[index] = own
            grows.append(Grow(req.row, index, (own,)))
        if missing:
            grows.append(Grow(req.row, len(req.table), tuple(taken)))
            req.table += taken
        return grows

    def receive(self, req: Request) -> bool:
        hits = self.index.find_chain(req.keys) if self.caching else []
        hits = hits[: (len(req.tokens) - 1) // self.block_size]  # its last token is computed here, in a private block
        missing = self.blocks_for(len(req.tokens)) - len(hits)
        if not self._fits(hits, missing, 0):
            return False
        self.pool.share(hits)  # first: what is shared is not evicted for the rest
        fresh = self.pool.take_settled(missing)
        if fresh is None:
            self.pool.release(reversed(hits), self.index.key_of)
            return False
        req.table, req.published = hits + fresh, len(hits)
        return True

    def blocks_of(self, keys: Sequence[bytes]) -> Sequence[int]:
        return self.index.find_chain(keys)

    def block_of(self, key: bytes) -> int | None:
        return self.index.block_of(key)

    def hold(self, req: Request, blocks: Sequence[int]) -> None:
        refs, room = self.pool.refs, self.pool.available - self.num_reserved
        num_idle = accumulate(not refs[block] for block in blocks)  # free until they are held
        req.table = [block for block, count in zip(blocks, num_idle, strict=True) if count <= room]
        self.pool.share(req.table)

    def trim(self, req: Request, num_tokens: int) -> None:
        while len(req.table) > self.blocks_for(num_tokens):
            self.pool.release((req.table.pop(),), self.index.key_of)
            req.num_reserved += req.is_reserved
            self.num_reserved += req.is_reserved

    def fork(self, leader: Request, follower: Request, num_tokens: int, reserves: bool = False) -> bool:
        if reserves:  # a copy of the partly filled last block, which both share, for either one included
            own = max(0, self.blocks_for(follower.max_computed) - num_tokens // self.block_size)
            more = max(0, self._reservation(leader, True) + (num_tokens % self.block_size > 0) - leader.num_reserved)
            if not self._fits([], 0, own + more):
                return False
            follower.is_reserved, follower.num_reserved, leader.num_reserved = True, own, leader.num_reserved + more
            self.num_reserved += own + more
        follower.table = leader.table[: self.blocks_for(num_tokens)]
        self.pool.share(follower.table)
        follower.published = len(follower.keys)  # the leader publishes them
        return True

    def publish(self, req: Request) -> Sequence[bytes]:
        upto = min(req.num_computed // self.block_size, len(req.keys))
        if not self.caching or upto <= req.published:
            return ()
        keys = req.keys[req.published : upto]
        self.index.publish(keys, req.table[req.published : upto])
        req.published = upto
        return keys

    def free(self, req: Request) -> Sequence[bytes]:
        published: Sequence[bytes] = ()
        if self.caching and req.chain and req.table:
            req.keys = extend_keys(req.keys, req.tokens, self.block_size, req.chain, req.num_computed)
            published = self.publish(req)
        self.num_reserved -= req.num_reserved
        req.num_reserved = 0
        # Free tail-first: the idle list is LRU, and a chain is useless without its head.
        self.pool.release(reversed(req.table), self.index.key_of)
        if req.host_table:
            self.host.release(req.host_table)
        req.table, req.host_table, req.num_computed, req.published = [], [], 0, 0
        return published

    def swap_out(self, req: Request) -> Sequence[bytes] | None:
        num_tokens = req.num_computed
        host = self.host.take(self.blocks_for(num_tokens))
        if not host:
            return None
        for src, dst in zip(req.table, host, strict=False):
            self._copy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.HOST, dst))
        published = self.free(req)
        req.host_table, req.num_computed = host, num_tokens
        return published

    def _swap_in(self, req: Request, total: int) -> None:
        fresh = self.pool.take(total)
        assert fresh is not None
        for src, dst in zip(req.host_table, fresh, strict=False):
            self._copy(BlockRef(Tier.HOST, src), BlockRef(Tier.DEVICE, dst))
        self.host.release(req.host_table)  # plans run in order: the next writer comes after this copy
        req.table, req.host_table = fresh, []

    def num_alone(self, req: Request, num_tokens: int) -> int:
        shared = bisect_left(req.table, True, key=lambda block: self.pool.refs[block] < 2)
        return max(0, num_tokens - shared * self.block_size)

    def drain(self, plan: int) -> tuple[list[BlockCopy], list[int]]:
        copies, given_up = self._copies, list(self.pool.given_up or ())
        for block in given_up:
            self.pool.name(block)
        self._copies, self.pool.newest = [], plan
        if given_up:
            self.pool.given_up = {}
        return copies, given_up

    def plan_collected(self, plan: int) -> None:
        self.pool.collected = plan

    def _replace(self, src: int, dst: int) -> None:
        """Copy-on-write: a shared block gives way to a private one."""
        self._copy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.DEVICE, dst))
        self.pool.release((src,), self.index.key_of)

    def _copy(self, src: BlockRef, dst: BlockRef) -> None:
        self._copies.append(BlockCopy(src, dst))
        for tier, block in (src, dst):
            if tier is Tier.DEVICE:
                self.pool.name(block)
