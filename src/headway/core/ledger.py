"""Which request owns which blocks: the only caller of `BlockPool`.

    table of a request      [ 7 ][ 3 ][ 9 ][ 4 ]
    cells                   0..15 16..31 32..47 48..        block_size = 16
    adopted from the cache  ├────────┤                      shared, never written
    reserved                          ├─────────┤           private
    cells present (computed)├───────────────┤

A table only grows while its request runs; the one change inside it is copy-on-write. Every promise is all or
nothing: `adopt` and `ensure` either do everything or touch nothing. Data moves as `BlockCopy` commands that the
scheduler puts into the plan; the ledger itself never waits for them, since plans run in order.
"""

from __future__ import annotations

from headway.core.blocks import BlockPool
from headway.core.plan import BlockCopy, BlockRef, Grow, Tier
from headway.core.prefix import PrefixIndex, extend_keys
from headway.core.request import Request


class KVLedger:
    """Refs of a block = number of tables it stands in; freeing every request brings all refs to zero."""

    def __init__(self, num_blocks: int, block_size: int, *, host_blocks: int = 0, caching: bool = True) -> None:
        self.block_size = block_size
        self.caching = caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index.forget)
        self.host = BlockPool(host_blocks, lambda _: None)
        self._copies: list[BlockCopy] = []

    def blocks_for(self, cells: int) -> int:
        return -(-cells // self.block_size)

    def can_ever_hold(self, req: Request) -> bool:
        """True if the request fits when it is alone."""
        return self.blocks_for(max(req.max_cells, req.num_prompt)) <= self.pool.num_blocks

    def cached_blocks(self, req: Request) -> list[int]:
        """The blocks of the longest prefix of its known tokens that the cache holds."""
        hits: list[int] = []
        for key in req.keys if self.caching else ():
            block = self.index.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def adopt(self, req: Request, spare: int = 0) -> bool:
        """Give the request a table for all its known tokens, the cached prefix shared, the rest private.

        False, and nothing touched, if that would leave fewer than `spare` blocks. At least one token stays to be
        computed: if the whole of it is cached, the last block is copied, because a shared block is never written.
        """
        if req.host_table:
            return self._swap_in(req, spare)
        if req.table:  # its KV was loaded from elsewhere
            return True
        hits = self.cached_blocks(req)
        total = self.blocks_for(len(req.tokens))
        copies_last = len(hits) * self.block_size == len(req.tokens)
        if not self._fits(hits, total - len(hits) + copies_last, spare):
            if not copies_last:
                return False
            hits.pop()  # no room for the copy: compute the last block anew instead
            copies_last = False
            if not self._fits(hits, total - len(hits), spare):
                return False
        for block in hits:
            self.pool.share(block)
        fresh = self.pool.take(total - len(hits) + copies_last)
        assert fresh is not None
        req.table = hits + fresh
        req.published = len(hits)
        req.computed = len(hits) * self.block_size
        if copies_last:
            shared = req.table.pop(len(hits) - 1)
            self._copy_device(shared, fresh[0])
            self._release(shared)
            req.computed = len(req.tokens) - 1
        return True

    def _fits(self, hits: list[int], fresh: int, spare: int) -> bool:
        woken = sum(1 for block in hits if self.pool.is_idle(block))
        return fresh + spare <= self.pool.available - woken

    def ensure(self, req: Request, start: int, end: int) -> list[Grow] | None:
        """Make cells start..end-1 writable: grow the table, copy what is shared. None, nothing touched: no room."""
        first, last = start // self.block_size, self.blocks_for(end)
        if first == len(req.table) == last - 1:  # the usual case: a decode row enters its next block
            block = self.pool.take_one()
            if block is None:
                return None
            req.table.append(block)
            return [Grow(req.row, first, (block,))]
        shared = [i for i in range(first, min(last, len(req.table))) if self.pool.refs(req.table[i]) > 1]
        missing = max(0, last - len(req.table))
        if not shared and not missing:
            return []
        taken = self.pool.take(len(shared) + missing)
        if taken is None:
            return None
        grows = []
        for index in shared:
            own = taken.pop()
            self._copy_device(req.table[index], own)
            self._release(req.table[index])
            req.table[index] = own
            grows.append(Grow(req.row, index, (own,)))
        if missing:
            grows.append(Grow(req.row, len(req.table), tuple(taken)))
            req.table += taken
        return grows

    def trim(self, req: Request, cells: int) -> None:
        """Give back the blocks beyond `cells`: drafts that were not accepted."""
        while len(req.table) > self.blocks_for(cells):
            self._release(req.table.pop())

    def fork(self, leader: Request, follower: Request, cells: int) -> None:
        """Let the follower stand on the leader's first `cells`; the partly filled last block is shared too."""
        follower.table = leader.table[: self.blocks_for(cells)]
        for block in follower.table:
            self.pool.share(block)
        follower.published = len(follower.keys)  # the leader publishes them

    def publish(self, req: Request) -> list[bytes]:
        """Index the full blocks below `computed` whose keys are known; returns the keys this settles."""
        upto = min(req.computed // self.block_size, len(req.keys))
        if not self.caching or upto <= req.published:
            return []
        settled = list(req.keys[req.published : upto])
        for i, key in enumerate(settled, req.published):
            self.index.publish(key, req.table[i])
            self.index.settle(key, req.row)
        req.published = upto
        return settled

    def free(self, req: Request) -> None:
        """Take everything back; what was computed, output included, stays in the cache while there is room."""
        if self.caching and req.chain and req.table:
            req.keys = extend_keys(req.keys, req.tokens[: req.computed], self.block_size, req.chain)
            self.publish(req)
        # Free tail-first: the idle list is LRU, and a chain is useless without its head.
        for block in reversed(req.table):
            self._release(block)
        for block in req.host_table:
            self.host.release(block, keep=False)
        req.table, req.host_table, req.computed, req.published = [], [], 0, 0

    def swap_out(self, req: Request) -> bool:
        """Move the computed cells to host memory. False, nothing touched: no room there."""
        cells = req.computed
        host = self.host.take(self.blocks_for(cells))
        if not host:
            return False
        for src, dst in zip(req.table, host, strict=False):
            self._copies.append(BlockCopy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.HOST, dst)))
        self.free(req)
        req.host_table, req.computed = host, cells
        return True

    def _swap_in(self, req: Request, spare: int) -> bool:
        total = self.blocks_for(len(req.tokens))
        if total + spare > self.pool.available:
            return False
        fresh = self.pool.take(total)
        assert fresh is not None
        for src, dst in zip(req.host_table, fresh, strict=False):
            self._copies.append(BlockCopy(BlockRef(Tier.HOST, src), BlockRef(Tier.DEVICE, dst)))
            self.host.release(src, keep=False)  # plans run in order: whoever takes it next writes after this copy
        req.table, req.host_table = fresh, []
        return True

    def drain_copies(self) -> list[BlockCopy]:
        """The copies that the next plan must run before anything else."""
        copies, self._copies = self._copies, []
        return copies

    def reset_cache(self) -> None:
        """Forget every prefix that nobody is using."""
        self.pool.drop_idle()

    def _copy_device(self, src: int, dst: int) -> None:
        self._copies.append(BlockCopy(BlockRef(Tier.DEVICE, src), BlockRef(Tier.DEVICE, dst)))

    def _release(self, block: int) -> None:
        self.pool.release(block, keep=self.index.key_of(block) is not None)
