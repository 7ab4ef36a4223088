"""A cell of a simulated fleet: the production front over engines that joined it, by a virtual clock.

Requests, their journal, resumes, the breaker, the budget of retries and what becomes of suspects are those of
`FleetClient` and `JoinedEngine`; connections are not, nor is time. Engines run on by themselves between two calls of
`advance`; what they say reaches the front `delay` seconds later, and what the front sends reaches them as late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from headway.bench.fleet.links import Lane
from headway.bench.fleet.node import NodeSetup, VirtualNode
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.joined import JoinedEngine
from headway.cluster.replica import Replica
from headway.cluster.routes._route import Route
from headway.engine.client import Output, Submit
from headway.engine.holder import RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import Command, Joining, Message
from headway.engine.process import ChildCommand
from headway.engine.supervision import Supervision
from headway.kv.prefix import chain_keys, chain_seed

DRAIN_S = 30.0  # that a replica which is given up may take for what it has


class NodeLink:
    """The front's end of a connection: an `EngineLink` over the inbox of a node."""

    num_pending = 0

    def __init__(self, node: VirtualNode, cell: Cell) -> None:
        self.where = node.name
        self._node = node
        self._cell = cell

    def send(self, command: Command) -> None:
        self._node.put(command, self._cell.now)

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CellEvents:
    """Who is told what becomes of requests, and when by the clock of the front."""

    first: Callable[[int, float], None]  # its first token came, or the first one after it was stalled
    stalled: Callable[[int, float], None]  # its engine had ended at this time
    ended: Callable[[Output, int, float], None]  # with as many tokens


class CellFront(FleetClient):
    """The front of service; no process, no listener, and no stream is cut off."""

    def __init__(self, route: Route, clock: Callable[[], float], events: CellEvents) -> None:
        gate = GateConfig("127.0.0.1", 0)  # never opened: engines join by calls
        how = ChildCommand((), "error", "text")
        super().__init__([], how, Supervision(), route=route, gate=gate, max_buffer_bytes=1 << 60, clock=clock)
        self._events = events
        self.nodes: dict[JoinedEngine, VirtualNode] = {}
        self.num_resumed = 0
        self._num_taken: dict[int, int] = {}  # tokens of open requests that were stalled

    def start(self, submit: Submit) -> Replica:  # type: ignore[override]
        """Send a request; the replica that gets it. EngineRestarting: there is none."""
        self.submit(submit).listen(lambda: self._events.first(submit.id, self._clock()))
        return self._home[submit.id]

    def held_by(self, keys: Sequence[bytes]) -> list[int]:
        """By replica: how many of the leading keys it has, as far as is known here."""
        return self._index.num_held(keys, max((each.number for each in self.replicas), default=-1) + 1)

    @property
    def index_size(self) -> int:
        return len(self._index)

    def engine_lost(self, engine: RequestHolder) -> None:
        assert isinstance(engine, JoinedEngine)
        for id in engine.entries:
            self._events.stalled(id, self.nodes[engine].ended)
            self._count_tokens(id)  # so that the next token is told
        super().engine_lost(engine)

    def _remove(self, replica: Replica) -> None:
        super()._remove(replica)
        self.nodes = {engine: node for engine, node in self.nodes.items() if engine is not replica.engine}

    def _place(
        self, entry: OpenRequest, *, is_new: bool, like: RequestHolder | None = None, but: Replica | None = None
    ) -> None:
        self.num_resumed += not is_new
        super()._place(entry, is_new=is_new, like=like, but=but)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.id)
        super()._deliver(output)
        if stream is not None:
            final = stream.take()
            num_tokens = self._num_taken.pop(output.id, 0) + (0 if final is None else len(final.tokens))
            self._events.ended(output, num_tokens, self._clock())

    def _count_tokens(self, id: int) -> None:
        stream = self._streams.get(id)
        came = None if stream is None else stream.take()
        if came is not None:
            self._num_taken[id] = self._num_taken.get(id, 0) + len(came.tokens)

    def retire(self, engine: JoinedEngine) -> None:
        """A replica that was drained leaves; what it still has goes on elsewhere."""
        self._move(engine)
        engine.dismiss("this replica was removed")
        self._remove(self._by_engine[engine])


class Cell:
    """`now` is the front's time."""

    def __init__(self, number: int, setup: NodeSetup, route: Route, events: CellEvents) -> None:
        self.number = number
        self.now = 0.0
        self.front = CellFront(route, lambda: self.now, events)
        self.nodes: list[VirtualNode] = []  # that run
        self.draining: dict[JoinedEngine, float] = {}  # since when
        self._setup = setup
        self._by_name: dict[str, VirtualNode] = {}
        self._count = 0  # of processes that were started

    @property
    def seed(self) -> bytes:
        return chain_seed("", "", "", b"")

    # Engines.

    def join(self, name: str) -> VirtualNode:
        """A process is up: a replica from now on, or again."""
        node = VirtualNode(name, self._setup, self.now, self._look_up)
        self._count += 1
        joining = Joining(name, f"{name}:{self._count}", self._count, node.world.engine.info)
        self.nodes.append(node)
        self._by_name[name] = node
        engine = self.front.join(NodeLink(node, self), joining)
        self.front.nodes[engine] = node
        return node

    def lose(self, node: VirtualNode) -> Callable[[], None]:
        """Its process ends now; to be called when the front notices that the connection is closed."""
        node.end(self.now)
        self.nodes.remove(node)
        engine = next(each for each, its in self.front.nodes.items() if its is node)
        link = engine.link

        def closed() -> None:
            if link is not None:
                engine.lost(link, "its process ended", is_crash=True)

        return closed

    def drain(self) -> None:
        """Give up the replica with the fewest requests."""
        engines = [each for each in self.front.joined() if each.takes_requests]
        engine = min(engines, key=lambda each: len(each.entries))
        engine.is_draining = True
        self.draining[engine] = self.now

    def _end_drained(self) -> list[VirtualNode]:
        ended = []
        for engine, since in list(self.draining.items()):
            if engine.link is None or not engine.entries or self.now - since >= DRAIN_S:
                node = self.front.nodes[engine]
                del self.draining[engine]
                if node.is_alive:
                    self.lose(node)
                    ended.append(node)
                self.front.retire(engine)
        return ended

    def _look_up(self, name: str, keys: Sequence[bytes]) -> tuple[int, Lane | None]:
        node = self._by_name.get(name)
        return (0, None) if node is None or not node.is_alive else (node.num_held(keys), node.outbound)

    # Time.

    def advance(self, now: float) -> None:
        """Run all engines up to this time, and hear what they said in time."""
        heard: list[tuple[float, JoinedEngine, Message]] = []
        latest = now - self._setup.delay
        for engine, node in self.front.nodes.items():
            node.run(now)
            told = node.told
            while told and told[0][0] <= latest:
                time, message = told.popleft()
                heard.append((time, engine, message))
        heard.sort(key=itemgetter(0))
        for time, engine, message in heard:
            self.now = max(self.now, time + self._setup.delay)
            if engine.link is not None:
                engine.take_message(engine.link, message)
        self.now = now

    def beat(self, passed_s: float) -> list[VirtualNode]:
        """Engines that live say so, what says nothing for long is dropped; those that were given up and end now."""
        for engine, node in self.front.nodes.items():
            if node.is_alive and engine.link is not None:
                engine.take_message(engine.link, node.alive())
        self.front.look(passed_s)
        return self._end_drained()

    # Load.

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        return chain_keys(tokens, self._setup.block_size, self.seed)

    @property
    def num_ready(self) -> int:
        return sum(each.engine.takes_requests for each in self.front.replicas)
