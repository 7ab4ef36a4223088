"""One engine of a simulated fleet: the production engine with its loop's commands and messages, and a clock of its own.

    inbox  ─▶ commands whose time has come ─▶ engine.step() by the cost model ─▶ told: messages with their times

It runs by itself up to a given time; a step that has begun is finished. What it says is on its way for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.bench.fleet.links import Lane, Lookup, PeerBlocks, TierBlocks
from headway.bench.virtual import EngineSetup, World
from headway.cluster.join import patience
from headway.control.costs import CostWeights
from headway.core.scheduler import Scheduler
from headway.engine.child import apply
from headway.engine.clock import VirtualClock
from headway.engine.messages import Alive, Command, Dismiss, Message, Shutdown
from headway.engine.mover import BlockMover
from headway.engine.virtual import VirtualExecutor
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits

# Llama-3.1-8b on one H200, from the step times in docs/log.md: 4.1 ms for one row, 22 us per prompt token.
H200 = CostWeights(base=4.1e-3, tokens=22e-6, pairs=2.2e-9, decode=3e-6, context=32e-9)
KV_BYTES = 131_072  # of a token of that model, in bfloat16
_TICK_S = 1e-3  # between two looks of an engine that waits for nothing that is known


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The size of an engine, and what lies between it and others."""

    num_blocks: int = 1_000
    block_size: int = 512
    slots: int = 256
    max_waiting: int = 1024
    delay: float = 0.005  # seconds between an engine and its front, each way
    weights: CostWeights = H200
    link_gbps: float = 0.0  # of an engine for KV, each way; 0: engines fetch nothing from each other
    link_s: float = 0.5e-3
    tier_gb: float = 0.0  # of an engine; 0: it has no tier
    tier_gbps: float = 50.0

    @property
    def block_bytes(self) -> int:
        return self.block_size * KV_BYTES

    def engine(self) -> EngineSetup:
        return EngineSetup(
            FirstComeFirstServed,
            Limits(self.slots, 8192),
            self.weights,
            self.num_blocks,
            caches=True,
            block_size=self.block_size,
            max_waiting=self.max_waiting,
        )


class VirtualNode:
    """`told` and `inbox` are in the order of their times."""

    def __init__(self, name: str, setup: NodeSetup, now: float, look_up: Lookup) -> None:
        self.name = name
        self.outbound = Lane(_bytes_per_s(setup.link_gbps), setup.link_s)
        self._sources: list[PeerBlocks | TierBlocks] = []
        self._lanes = [self.outbound]
        moves = setup.link_gbps > 0 or setup.tier_gb > 0
        self._setup, self._look_up = setup, look_up
        fetch_at = name if setup.link_gbps > 0 else ""
        self.world = World(setup.engine(), moves=self._mover if moves else None, fetch_at=fetch_at)
        self.world.clock.advance(now)
        self._expected_s = math.nan  # of the last step that began
        self.world.engine.announce(self._expect)
        self.inbox: deque[tuple[float, Command]] = deque()
        self.told: deque[tuple[float, Message]] = deque()
        self.busy_s = 0.0
        self.began = now
        self.ended = math.nan  # it is gone since

    def _mover(self, scheduler: Scheduler, executor: VirtualExecutor, clock: VirtualClock) -> BlockMover:
        setup, data = self._setup, bytes(executor.block_bytes())
        peers = tier = None
        if setup.link_gbps > 0:
            inbound = Lane(_bytes_per_s(setup.link_gbps), setup.link_s)
            self._lanes.append(inbound)
            peers = PeerBlocks(clock, data, setup.block_bytes, inbound, self._look_up)
            self._sources.append(peers)
        if setup.tier_gb > 0:
            num_blocks = int(setup.tier_gb * 1e9 / setup.block_bytes)
            lane = Lane(_bytes_per_s(setup.tier_gbps))
            self._lanes.append(lane)
            tier = TierBlocks(clock, data, setup.block_bytes, lane, num_blocks)
            self._sources.append(tier)
        return BlockMover(scheduler, executor, tier=tier, peers=peers, timer=clock.now)

    @property
    def is_alive(self) -> bool:
        return math.isnan(self.ended)

    @property
    def link_busy_s(self) -> float:
        """Of the busiest direction of its link, or of its tier."""
        return max(lane.busy_s for lane in self._lanes)

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Of the leading keys, how many the engine's cache has now."""
        return len(self.world.scheduler.state.ledger.blocks_of(keys))

    def end(self, now: float) -> None:
        """It is gone: what it has said is still on its way, what it was told is lost."""
        self.ended = now
        self.inbox.clear()

    def put(self, command: Command, now: float) -> None:
        """The front sends a command."""
        if self.is_alive and not isinstance(command, Dismiss | Shutdown):
            self.inbox.append((now + self._setup.delay, command))

    def run(self, until: float) -> None:
        """Do what there is to do before this time."""
        engine, clock = self.world.engine, self.world.clock
        while self.is_alive:
            now = clock.now()
            while self.inbox and self.inbox[0][0] <= now:
                command = self.inbox.popleft()[1]
                assert not isinstance(command, Dismiss | Shutdown)
                self._tell(apply(engine, command))
            if not engine.has_work:
                self._tell_news()
                if not self.inbox or self.inbox[0][0] >= until:
                    return
                clock.advance(self.inbox[0][0] - now)
                continue
            if now >= until:
                return
            emission = engine.step()
            self.busy_s += clock.now() - now
            if emission.ids or emission.finished:
                self.told.append((clock.now(), emission))
            self._tell_news()
            if emission.idle_s is not None and clock.now() == now:
                clock.advance(self._next(now, emission.idle_s, until) - now)

    def _next(self, now: float, idle_s: float, until: float) -> float:
        """When an engine that can do nothing now can do something."""
        times = [until, now + (idle_s or _TICK_S), *(source.next_time for source in self._sources)]
        return min(self.inbox[0][0], *times) if self.inbox else min(times)

    def alive(self) -> Alive:
        """What it says four times a second."""
        engine = self.world.engine
        return Alive(engine.num_steps, engine.has_work, patience(self._expected_s, has_device=False))

    def _expect(self, seconds: float) -> None:
        self._expected_s = seconds

    def _tell(self, messages: Sequence[Message]) -> None:
        now = self.world.clock.now()
        self.told.extend((now, message) for message in messages)

    def _tell_news(self) -> None:
        engine = self.world.engine
        for news in (engine.news(), engine.block_news()):
            if news is not None:
                self.told.append((self.world.clock.now(), news))


def _bytes_per_s(gbps: float) -> float:
    return max(gbps, 1e-9) * 1e9 / 8
