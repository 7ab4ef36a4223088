"""A whole fleet by a virtual clock: cells, what is lost and comes back, and an autoscaler.

    arrival ─▶ cell by the prefix ─▶ front of the cell ─▶ route ─▶ engine          one event after the other;
    loss of replicas · a process is up · every quarter of a second ─▶ cells        engines run up to each of them

Equal arguments give equal reports. What happens in a cell is in `cell`, what came of it in `report`.
"""

from __future__ import annotations

import gc
import heapq
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from headway.bench.fleet.arrivals import BLOCK, TraceArrival
from headway.bench.fleet.cell import Cell, CellEvents
from headway.bench.fleet.cells import CellChoice
from headway.bench.fleet.node import NodeSetup, VirtualNode
from headway.bench.fleet.report import FleetReport, LoadMoment, Served
from headway.bench.fleet.scale import HeldTarget, ScaleSetup, add_up
from headway.cluster.gate import LOOK_S
from headway.cluster.routes._route import load_route
from headway.cluster.scaling import measure
from headway.engine.child import OVERLOADED
from headway.engine.client import Output, Submit
from headway.errors import EngineRestarting
from headway.values.params import SamplingParams

RETRY_S = 2.0  # after which a client that was refused comes again
_SCALE_S = 1.0  # between two looks of the autoscaler


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """Replicas that end at one time."""

    at: float
    num_replicas: int
    is_machine: bool = False  # nothing says that they are gone but their silence


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """A fleet, and what happens to it."""

    num_replicas: int = 8
    node: NodeSetup = field(default_factory=NodeSetup)
    route: str = "cost"
    cell_size: int = 64
    cell_blocks: int = 1  # of a prompt, which choose its cell
    spill: float = 1.25
    start_s: float = 30.0  # from the order of a replica to its first request
    losses: Sequence[ReplicaLoss] = ()
    scale: ScaleSetup | None = None  # None: what is lost is started again, and nothing else
    seed: int = 0  # of which replicas are lost

    @property
    def num_cells(self) -> int:
        return -(-max(self.num_replicas, self.scale.most if self.scale else 0) // self.cell_size)


def simulate_fleet(
    arrivals: Iterable[TraceArrival], setup: FleetSetup, *, told: Callable[[int], None] = lambda done: None
) -> FleetReport:
    """Serve all of them; `told` hears now and then how many have ended."""
    log = logging.getLogger("headway.cluster")
    level, was_enabled = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL + 1)  # losses are meant to happen
    gc.disable()  # requests form no cycles
    try:
        return _Simulation(setup, told).run(arrivals)
    finally:
        log.setLevel(level)
        if was_enabled:
            gc.enable()


class _Simulation:
    """`_now` is the time of the event that happens."""

    def __init__(self, setup: FleetSetup, told: Callable[[int], None]) -> None:
        self._setup = setup
        self._moves_blocks = setup.node.link_gbps > 0 or setup.node.tier_gb > 0
        self._told = told
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._ids, self._names = count(), count(1), count()
        self._rng = random.Random(setup.seed)
        self.report = FleetReport()
        self._served: dict[int, Served] = {}  # open requests
        self._arrival: dict[int, TraceArrival] = {}
        self._expected: dict[int, int] = {}  # cached tokens, of requests that came in quiet
        self._num_retrying = 0
        self._num_starting = 0
        self._ordered: dict[VirtualNode, float] = {}
        self._target = HeldTarget(setup.scale, setup.num_replicas) if setup.scale else None
        events = CellEvents(self._first, self._stalled, self._ended)
        self._cells = [Cell(at, setup.node, load_route(setup.route), events) for at in range(setup.num_cells)]
        self._choice = CellChoice(len(self._cells), setup.cell_blocks, setup.spill)
        for number in range(setup.num_replicas):
            self._start(self._cells[number * len(self._cells) // setup.num_replicas], 0.0)

    def run(self, arrivals: Iterable[TraceArrival]) -> FleetReport:
        for loss in self._setup.losses:
            self._at(loss.at, lambda loss=loss: self._lose(loss))  # type: ignore[misc]
        self._at(LOOK_S, self._beat)
        if self._setup.scale is not None:
            self._at(_SCALE_S, self._scale)
        coming = iter(arrivals)
        arrival = next(coming, None)
        while arrival is not None or self._served or self._num_retrying:
            if arrival is None or (self._events and self._events[0][0] < arrival.at):
                self._now, _, happen = heapq.heappop(self._events)
                happen()
            else:
                self._now = arrival.at
                self._submit(arrival, Served(arrival.at, arrival.num_prompt))
                arrival = next(coming, None)
        return self._finish()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    # Requests.

    def _submit(self, arrival: TraceArrival, served: Served) -> None:
        id, now = next(self._ids), self._now
        submit = Submit(id, arrival.tokens(), SamplingParams(max_tokens=arrival.num_output))
        loads = [cell.front.num_open / cell.num_ready if cell.num_ready else math.inf for cell in self._cells]
        cell = self._cells[self._choice.choose(arrival.blocks, loads)]
        cell.advance(now)
        self._served[id], self._arrival[id] = served, arrival
        try:
            replica = cell.front.start(submit)
        except EngineRestarting:
            self._refuse(id)
            return
        node = cell.front.nodes[replica.engine]  # type: ignore[index]
        if served.num_retries == 0:
            self._note_place(cell, replica.number, submit)
        claim = replica.claims.get(id)
        if claim is not None and not self._moves_blocks and self._is_quiet(node):
            self._expected[id] = claim.num_tokens

    def _is_quiet(self, node: VirtualNode) -> bool:
        """A request was just sent to this engine, which has nothing else, and all that it said has arrived."""
        return not node.world.engine.has_work and not node.told and len(node.inbox) == 1

    def _note_place(self, cell: Cell, number: int, submit: Submit) -> None:
        """Whether its first block is anywhere, and where it went."""
        if len(submit.tokens) <= BLOCK:
            return
        keys = cell.keys(submit.tokens[:BLOCK])
        if cell.front.held_by(keys)[number]:
            self.report.num_repeated += 1
            self.report.num_reached += 1
        elif any(any(each.front.held_by(keys)) for each in self._cells):
            self.report.num_repeated += 1

    def _refuse(self, id: int) -> None:
        """Its client comes again."""
        served, arrival = self._served.pop(id), self._arrival.pop(id)
        served.num_retries += 1
        self._num_retrying += 1
        self.report.num_refused += 1

        def again() -> None:
            self._num_retrying -= 1
            self._submit(arrival, served)

        self._at(self._now + RETRY_S, again)

    def _first(self, id: int, now: float) -> None:
        served = self._served[id]
        if math.isnan(served.first):
            served.first = now
        elif not math.isnan(served.stalled):
            self.report.pauses.append(now - served.stalled)
        served.stalled = math.nan

    def _stalled(self, id: int, since: float) -> None:
        served = self._served.get(id)
        if served is not None and not math.isnan(served.first) and math.isnan(served.stalled):
            served.stalled = since

    def _ended(self, output: Output, num_tokens: int, now: float) -> None:
        if output.code == OVERLOADED:
            self._refuse(output.id)
            return
        report, served, arrival = self.report, self._served.pop(output.id), self._arrival.pop(output.id)
        served.ended, served.num_output = now, arrival.num_output
        served.is_answered = output.finish == "length" and num_tokens == arrival.num_output
        report.num_cached += output.cached_tokens
        expected = self._expected.pop(output.id, None)
        if expected is not None:
            report.num_quiet += 1
            report.num_wrong += expected != output.cached_tokens
        report.served.append(served)
        self._told(len(report.served))

    # Replicas.

    def _start(self, cell: Cell, ordered: float, name: str = "") -> None:
        """A replica is up now."""
        node = cell.join(name or f"engine-{next(self._names)}")
        self._ordered[node] = ordered

    def _order(self, cell: Cell, name: str = "") -> None:
        """A replica will be up when it has loaded its model."""
        ordered = self._now
        self._num_starting += 1

        def is_up() -> None:
            self._num_starting -= 1
            cell.advance(self._now)
            self._start(cell, ordered, name)

        self._at(self._now + self._setup.start_s, is_up)

    def _lose(self, loss: ReplicaLoss) -> None:
        """So many replicas end now, drawn from all."""
        places = [(cell, node) for cell in self._cells for node in cell.nodes]
        for cell in self._cells:
            cell.advance(self._now)
        for cell, node in self._rng.sample(places, min(loss.num_replicas, len(places))):
            self._give_back(node)
            closed = cell.lose(node)
            if not loss.is_machine:
                self._at(self._now + self._setup.node.delay, self._noticed(cell, closed))
            if self._setup.scale is None:
                self._order(cell, node.name)
        self.report.losses.append(self._now)

    def _noticed(self, cell: Cell, closed: Callable[[], None]) -> Callable[[], None]:
        def happen() -> None:
            cell.advance(self._now)
            closed()

        return happen

    def _give_back(self, node: VirtualNode) -> None:
        """It is paid for until now."""
        self.report.replica_s += self._now - self._ordered.pop(node)

    def _beat(self) -> None:
        for cell in self._cells:
            cell.advance(self._now)
            for node in cell.beat(LOOK_S):
                self._give_back(node)
        self._at(self._now + LOOK_S, self._beat)

    def _scale(self) -> None:
        assert self._target is not None
        load = add_up([measure(cell.front) for cell in self._cells], self._num_retrying)
        starting, ready = self._num_starting, load.num_engines
        wanted, have = self._target.look(self._now, load), ready + starting
        for _ in range(wanted - have):
            self._order(min(self._cells, key=lambda cell: (cell.num_ready, cell.number)))
        for _ in range(min(have - wanted, ready - 1)):
            cell = max(self._cells, key=lambda cell: (cell.num_ready, cell.number))
            if cell.num_ready > 1:
                cell.drain()
        self.report.timeline.append(LoadMoment(self._now, ready, starting, load.num_requests, load.wait_s))
        self._at(self._now + _SCALE_S, self._scale)

    def _finish(self) -> FleetReport:
        report = self.report
        report.makespan = self._now
        for node in list(self._ordered):
            self._give_back(node)
        nodes = [node for cell in self._cells for node in cell.nodes]
        report.busy = [node.busy_s / (self._now - node.began) for node in nodes if self._now > node.began]
        report.by_cell = [sum(node.busy_s for node in cell.nodes) for cell in self._cells]
        report.num_resumed = sum(cell.front.num_resumed for cell in self._cells)
        report.num_offered = sum(cell.front.budget.num_offered for cell in self._cells)
        report.num_attempts = sum(cell.front.budget.num_attempts for cell in self._cells)
        stats = [node.world.engine.stats() for node in nodes]
        report.num_from_tier = sum(each.tokens_from_tier for each in stats)
        report.num_from_peers = sum(each.tokens_from_peers for each in stats)
        report.link_busy = max((node.link_busy_s / self._now for node in nodes), default=0.0)
        report.index_sizes = [cell.front.index_size for cell in self._cells]
        return report
