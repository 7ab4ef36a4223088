"""Links and disks by a virtual clock: KV blocks that come from a peer or a tier, when their bytes would have come.

What asks is the engine's own `BlockMover`; this is what lies behind it. A link carries one block after the other, in
the order in which they are asked for, so that loads at the same time wait for each other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count

from headway.engine.arrivals import ArrivedBlock
from headway.engine.clock import VirtualClock

Lookup = Callable[[str, Sequence[bytes]], "tuple[int, Lane | None]"]
"""How many of the leading keys a peer has now, and the lane out of it; none if it is not there."""


class Lane:
    """One direction of a link, or a disk that is read."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at = 0.0
        self.busy_s = 0.0

    def carry(self, now: float, num_bytes: int, other: Lane | None = None) -> float:
        """When these bytes are across; with another lane behind it, as fast as the slower one."""
        lanes = (self,) if other is None else (self, other)
        start = max(now, *(lane.free_at for lane in lanes))
        seconds = num_bytes / min(lane.bytes_per_s for lane in lanes)
        for lane in lanes:
            lane.free_at = start + seconds
            lane.busy_s += seconds
        return start + seconds + self.latency_s


class _TimedSource:
    """Arrivals that are there from their time on."""

    def __init__(self, clock: VirtualClock, data: bytes, block_bytes: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._data = data  # what a block is to the engine, which computes nothing
        self._block_bytes = block_bytes  # what it is to a link
        self._arrivals: list[tuple[float, int, ArrivedBlock]] = []
        self._numbers = count()

    @property
    def next_time(self) -> float:
        return self._arrivals[0][0] if self._arrivals else math.inf

    @property
    def has_arrivals(self) -> bool:
        return self.next_time <= self._clock.now()

    def take(self, most: int) -> list[ArrivedBlock]:
        taken: list[ArrivedBlock] = []
        while len(taken) < most and self.has_arrivals:
            taken.append(heapq.heappop(self._arrivals)[2])
        return taken

    def cancel(self, ticket: int) -> None:
        self._arrivals = [each for each in self._arrivals if each[2].ticket != ticket]
        heapq.heapify(self._arrivals)

    def close(self) -> None: ...

    def _announce(self, ticket: int, times: Sequence[float]) -> None:
        """Blocks at these times, and the end of the load with the last."""
        for place, time in enumerate(times):
            heapq.heappush(self._arrivals, (time, next(self._numbers), ArrivedBlock(ticket, place, self._data)))
        end = times[-1] if times else self._clock.now()
        heapq.heappush(self._arrivals, (end, next(self._numbers), ArrivedBlock(ticket, len(times), None)))


class PeerBlocks(_TimedSource):
    """A `BlockSource` over other engines of the simulation."""

    def __init__(self, clock: VirtualClock, data: bytes, block_bytes: int, inbound: Lane, look_up: Lookup) -> None:
        super().__init__(clock, data, block_bytes)
        self._inbound = inbound
        self._look_up = look_up

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        found, outbound = self._look_up(at, keys)
        now = self._clock.now()
        self._announce(ticket, [self._inbound.carry(now, self._block_bytes, outbound) for _ in range(found)])


class TierBlocks(_TimedSource):
    """A `Keeper`: keys of the blocks used last, as many as fit. Writing costs nothing, reading takes its lane."""

    def __init__(self, clock: VirtualClock, data: bytes, block_bytes: int, lane: Lane, num_blocks: int) -> None:
        super().__init__(clock, data, block_bytes)
        self._lane = lane
        self._num_blocks = num_blocks
        self._held: dict[bytes, None] = {}  # used last is last

    def num_held(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._held), len(keys))

    def wants(self, key: bytes, num_bytes: int) -> bool:
        return key not in self._held

    def store(self, key: bytes, data: memoryview) -> None:
        self._held[key] = None
        if len(self._held) > self._num_blocks:
            del self._held[next(iter(self._held))]

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        now, found = self._clock.now(), keys[: self.num_held(keys)]
        for key in found:
            self._held[key] = self._held.pop(key)
        self._announce(ticket, [self._lane.carry(now, self._block_bytes) for _ in found])
