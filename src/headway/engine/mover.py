"""KV blocks on their way in and out of the pool, beside the plans: what the engine's thread does about them each turn.

    in    a request whose prefix is elsewhere is LOADING ─▶ a source reads, verifies ─▶ written to its blocks ─▶ loaded
    out   a block that was published ─▶ its bytes are copied ─▶ stored by the tier's thread
    out   a peer asks for keys ─▶ their blocks are held for its lease ─▶ its thread copies them while the lease holds

Every read of a block and every write happens while the ledger says that nothing else writes it: published blocks are
not written while they are published, those of a LOADING request are named by no plan. A reader on another thread
checks after each copy that its hold still stands (`Hold.is_valid`), which ends before the blocks are given on. A load
that fails, is late, is short or is aborted costs a cache miss.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from threading import Event
from typing import Protocol

from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.arrivals import ArrivedBlock, BlockSource
from headway.engine.executor import MovesBlocks
from headway.kv.prefix import extend_keys
from headway.values.params import SamplingParams
from headway.values.states import State

LOAD_LEASE_S = 10.0  # for KV to arrive; then it is computed here
MOST_LEASE_S = 60.0  # that a peer may ask for
_SLICE_S, _IDLE_SLICE_S = 0.0005, 0.02  # of one turn, beside steps and without
_SLICE_SHARE = 0.04  # of the last step's time, where that is more
_MOST_ASKS = 256


class Closable(Protocol):
    """Whatever ends."""

    def close(self) -> None: ...


class Keeper(BlockSource, Protocol):
    """A tier: a source that is told of new blocks."""

    def num_held(self, keys: Sequence[bytes]) -> int: ...

    def wants(self, key: bytes, num_bytes: int) -> bool: ...

    def store(self, key: bytes, data: memoryview) -> None: ...


@dataclass(eq=False, slots=True)
class Hold:
    """Blocks of leading keys, kept for a reader. What was copied while `is_valid` was still true afterwards is good."""

    id: int
    blocks: Sequence[int]
    until: float
    is_valid: bool = True
    last_key: bytes = b""  # of a request's: the key of its last block
    of: Hold | None = None  # the hold that this is a part of, and ends with

    @property
    def stands(self) -> bool:
        return self.is_valid and (self.of is None or self.of.is_valid)


@dataclass(eq=False, slots=True)
class _Ask:
    keys: Sequence[bytes]
    lease_s: float
    answered: Event = field(default_factory=Event)
    hold: Hold | None = None
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    req: Request
    source: BlockSource
    first: int  # index in the table of the first block to come
    num_wanted: int
    num_tokens: int  # computed when all have come
    at: str  # of a peer
    began: float  # by the timer
    arrived: set[int] = field(default_factory=set)


class BlockMover:
    """Belongs to the engine's thread but for `ask` and `done`. What it holds open ends with a lease at the latest."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: MovesBlocks,
        *,
        tier: Keeper | None = None,
        peers: BlockSource | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._tier = tier
        self._peers = peers
        self._timer = timer
        self._block_bytes = executor.block_bytes()
        self._tickets = count(1)
        self._hold_ids = count(-1, -1)  # no request of a client has a negative id
        self._loads: dict[int, _Load] = {}
        self._block_s: dict[str, float] = {}  # by peer: seconds that a block of a load has taken, all in all
        self._fresh: dict[bytes, None] = {}  # published and perhaps not in the tier
        self._holds: dict[int, Hold] = {}
        self._kept: dict[int, Hold] = {}  # blocks of each request that is HELD
        self._kept_by: dict[bytes, Hold] = {}  # the same by last key; of requests with equal tokens, one
        self._asks: deque[_Ask] = deque()
        self._over: deque[Hold] = deque()
        self.wake: Callable[[], None] = lambda: None
        self.server: Closable | None = None  # hands blocks to peers; ends with this
        self.tokens_from_tier = 0
        self.tokens_from_peers = 0
        self.num_failed = 0  # loads that brought less than was asked for

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call this, on any thread, when there is something for `turn` to do."""
        self.wake = wake
        for source in (self._tier, self._peers):
            if source is not None:
                source.wake = wake

    def close(self) -> None:
        """Store what is new, then end the threads behind it."""
        self.keep()
        if self.server is not None:
            self.server.close()
        for source in (self._tier, self._peers):
            if source is not None:
                source.close()

    def keep(self) -> None:
        """Hand all new blocks to the tier now, however long that takes."""
        self._store_fresh(math.inf)

    def told(self, key: bytes, is_here: bool) -> None:
        """A block came to the prefix cache, or its content is about to change."""
        if is_here and self._tier is not None:
            self._fresh[key] = None
        else:
            self._fresh.pop(key, None)

    @property
    def has_work(self) -> bool:
        """True if a turn has something to do now."""
        sources = [source for source in (self._tier, self._peers) if source is not None]
        return bool(self._fresh or self._asks or self._over) or any(source.has_arrivals for source in sources)

    # Loading.

    def begin(self, req: Request, at: str, add: Callable[[Request], None], fetch_tokens: int = 0) -> None:
        """Add a request: as LOADING if more of its KV is elsewhere than here. `at`: a peer that has it.

        With `fetch_tokens` the peer has that of so many tokens, which are fetched if it is the quicker way.
        """
        size, num_tokens = self._block_size, len(req.tokens) - 1
        source: BlockSource | None = None
        keys, num_here = list(req.keys[: num_tokens // size]), self._scheduler.num_cached(req) // size
        if req.parent is not None and req.parent in self._scheduler.state.live:
            pass  # its leader loads or computes the prompt
        elif at and self._peers is not None and not fetch_tokens:
            source, keys = self._peers, wanted_keys(req, size)
        else:
            num_kept = 0 if self._tier is None else num_here + self._tier.num_held(keys[num_here:])
            num_there = min(len(keys), fetch_tokens // size) if at and self._peers is not None else 0
            if num_there > max(num_here, num_kept) and self._is_quicker(at, num_here, num_there):
                source, keys = self._peers, keys[:num_there]
            else:
                source, keys = self._tier, keys[:num_kept]
            num_tokens = len(keys) * size
        if source is None or len(keys) <= num_here:
            add(req)
            return
        req.state = State.LOADING
        add(req)
        if req.state is State.LOADING:  # else there was no room to receive
            ticket = next(self._tickets)
            num_wanted, began = len(keys) - req.published, self._timer()
            load = self._loads[ticket] = _Load(req, source, req.published, num_wanted, num_tokens, at, began)
            source.load(ticket, keys[load.first :], at)

    @property
    def _block_size(self) -> int:
        return self._scheduler.state.ledger.block_size

    def _is_quicker(self, at: str, num_here: int, num_there: int) -> bool:
        """True if these blocks come from a peer sooner than they are computed, by what either has taken before."""
        costs, size = self._scheduler.state.costs, self._block_size
        each_s = self._block_s.get(at)
        if each_s is None or not costs.is_ready:
            return True
        num_blocks = num_there - num_here
        if each_s * num_blocks < costs.prefill(num_blocks * size, num_here * size):
            return True
        self._block_s[at] = 0.9 * each_s  # so that one that was slow is tried again some time
        return False

    def _note_time(self, load: _Load, num_blocks: int) -> None:
        """How long a load from a peer has taken; one that fails makes the next ones seem slower."""
        each_s = (self._timer() - load.began) / max(1, num_blocks)
        known = self._block_s.pop(load.at, each_s)
        self._block_s[load.at] = 0.7 * known + 0.3 * each_s
        if len(self._block_s) > _MOST_ASKS:
            del self._block_s[next(iter(self._block_s))]

    def _arrive(self, arrival: ArrivedBlock, now: float) -> None:
        load = self._loads.get(arrival.ticket)
        if load is None:
            return  # late: it was aborted, or its lease has ended
        if arrival.data is None:
            self._end(arrival.ticket, load, now)
        elif 0 <= arrival.place < load.num_wanted and arrival.place not in load.arrived:
            if len(arrival.data) != self._block_bytes:
                return
            at = load.first + arrival.place
            data = memoryview(arrival.data)
            self._executor.write_block(load.req.table[at], data, load.req.tokens, at * self._block_size)
            load.arrived.add(arrival.place)
            if len(load.arrived) == load.num_wanted:
                self._end(arrival.ticket, load, now)

    def _end(self, ticket: int, load: _Load, now: float) -> None:
        """Nothing more is to come: what came without a gap counts."""
        del self._loads[ticket]
        num_blocks = next(at for at in range(load.num_wanted + 1) if at not in load.arrived)
        if num_blocks < load.num_wanted:
            self.num_failed += 1
        num_tokens = min(load.num_tokens, (load.first + num_blocks) * self._block_size)
        num_new = num_tokens - load.first * self._block_size if num_blocks else 0
        if load.source is self._tier:
            self.tokens_from_tier += num_new
        else:
            self.tokens_from_peers += num_new
            self._note_time(load, num_blocks)
        self._scheduler.loaded(load.req.id, num_tokens if num_blocks else 0, now)

    # Holding for peers.

    def held(self, req: Request) -> None:
        """A request has ended and keeps its blocks for a peer, which gets them without waiting for a step."""
        if req.state is State.HELD and req.chain and req.num_computed:
            key = chain_with_tail(req, req.num_computed, self._block_size)[-1]
            blocks = req.table[: -(-req.num_computed // self._block_size)]
            until = self._scheduler.state.leases[req.id]
            self._kept[req.id] = self._kept_by[key] = Hold(req.id, blocks, until, last_key=key)

    def drop(self, id: int) -> None:
        """A request is about to be aborted or released: what a peer copies of it from now on is not good."""
        kept = self._kept.pop(id, None)
        if kept is not None:
            kept.is_valid = False
            if self._kept_by.get(kept.last_key) is kept:
                del self._kept_by[kept.last_key]

    def hold(self, keys: Sequence[bytes], lease_s: float, now: float) -> Hold:
        """Keep the blocks of the leading keys that are here as they are, for so long; fewer if memory is reserved."""
        state = self._scheduler.state
        blocks = list(state.ledger.blocks_of(keys))
        hold = Hold(next(self._hold_ids), blocks, now + min(lease_s, MOST_LEASE_S))
        if blocks:
            reader = Request(hold.id, [], SamplingParams(max_tokens=1), state=State.HELD)
            self._scheduler.hold(reader, blocks, hold.until)
            hold.blocks, self._holds[hold.id] = list(reader.table), hold
            if not hold.blocks:
                self.release(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """The reader is done."""
        hold.is_valid = False
        if self._holds.pop(hold.id, None) is not None:
            self._scheduler.release(hold.id)

    def ask(self, keys: Sequence[bytes], lease_s: float, timeout_s: float) -> Hold | None:
        """`hold`, from any other thread; None: the engine is too busy to answer in time."""
        kept = self._kept_by.get(keys[-1])
        if kept is not None and kept.is_valid and len(keys) <= len(kept.blocks):
            return replace(kept, blocks=kept.blocks[len(kept.blocks) - len(keys) :], of=kept)
        if len(self._asks) >= _MOST_ASKS:
            return None
        ask = _Ask(keys, lease_s)
        self._asks.append(ask)
        self.wake()
        if ask.answered.wait(timeout_s):
            return ask.hold
        ask.is_over = True
        if ask.answered.is_set() and ask.hold is not None:  # answered just now
            self.done(ask.hold)
        return None

    def done(self, hold: Hold) -> None:
        """`release`, from any other thread."""
        if hold.of is None:  # else a request has the blocks, until it is released
            self._over.append(hold)
            self.wake()

    def copy_out(self, hold: Hold, index: int, into: memoryview) -> bool:
        """Copy a held block, from any thread; False: the hold has ended, and what was copied may be anything."""
        self._executor.read_block(hold.blocks[index], into)
        return hold.stands

    # Each turn.

    def turn(self, now: float, *, is_idle: bool, step_s: float = 0.0) -> None:
        """Before each step: end what is over, answer peers, and copy for a bounded time."""
        for hold in [hold for hold in self._holds.values() if hold.until <= now]:
            hold.is_valid = False  # before the scheduler, at the same `now`, gives its blocks on
            del self._holds[hold.id]
        for kept in [kept for kept in self._kept.values() if kept.until <= now]:
            self.drop(kept.id)
        while self._over:
            self.release(self._over.popleft())
        while self._asks:
            ask = self._asks.popleft()
            if not ask.is_over:
                ask.hold = self.hold(ask.keys, ask.lease_s, now)
                ask.answered.set()
                if ask.is_over:
                    self.release(ask.hold)
        for ticket in [ticket for ticket, load in self._loads.items() if load.req.state is not State.LOADING]:
            self._loads.pop(ticket).source.cancel(ticket)  # aborted, or its lease has ended: its blocks are not its own
        until = self._timer() + (_IDLE_SLICE_S if is_idle else max(_SLICE_S, _SLICE_SHARE * step_s))
        self._take_arrivals(until, now)
        self._store_fresh(until)

    def _take_arrivals(self, until: float, now: float) -> None:
        for source in (self._tier, self._peers):
            while source is not None and source.has_arrivals:
                for arrival in source.take(1):
                    self._arrive(arrival, now)
                if self._timer() >= until:
                    return

    def _store_fresh(self, until: float) -> None:
        tier = self._tier
        while self._fresh and tier is not None:
            key = next(iter(self._fresh))
            del self._fresh[key]
            if not tier.wants(key, self._block_bytes):
                continue
            block = self._scheduler.state.ledger.block_of(key)
            if block is not None:
                data = memoryview(bytearray(self._block_bytes))
                self._executor.read_block(block, data)
                tier.store(key, data)
            if self._timer() >= until:
                return


def tail_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Of a block that is filled in part, behind the prefix that `parent` covers."""
    return sha256(b"tail" + parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


def wanted_keys(req: Request, block_size: int) -> list[bytes]:
    """Of the KV that a peer may have of a request: all its tokens but the last, the last block perhaps in part."""
    return chain_with_tail(req, len(req.tokens) - 1, block_size)


def chain_with_tail(req: Request, num_tokens: int, block_size: int) -> list[bytes]:
    """The keys of all blocks of its first tokens, the last of which may be filled in part."""
    keys = extend_keys(req.keys[: num_tokens // block_size], req.tokens, block_size, req.chain, num_tokens)
    if num_tokens % block_size:
        parent = keys[-1] if keys else req.chain
        keys.append(tail_key(parent, req.tokens[len(keys) * block_size : num_tokens]))
    return keys
