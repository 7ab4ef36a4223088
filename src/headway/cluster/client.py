"""A fleet of engines behind one client: each request goes to one of them, and to another one if that ends.

    submit ─▶ route chooses a replica ─▶ its engine ─▶ tokens ─▶ stream
                    ▲                        │ its process ends, or its connection
                    └── what it held ◀───────┘ goes on elsewhere, token for token; suspects of a crash wait for the next
                                               process of their own replica, so that no other engine crashes by them

One replica is the ordinary server. A fleet without a gate is dead once every replica has given up; with one, engines
may still join. Which replica holds which blocks is in `index`, how one is chosen in `routes`, how a process is replaced
in `engine.supervisor`, how engines join and leave in `members`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from headway.cluster import handoff
from headway.cluster.breaker import RetryBudget
from headway.cluster.gate import EngineGate, GateConfig
from headway.cluster.joined import JoinedEngine
from headway.cluster.members import Members
from headway.cluster.replica import BlockClaim, Replica, add_up, computes_as, room_of, split, tokens_held, told_to
from headway.cluster.routes._route import Route
from headway.cluster.routes.cost import CostRoute
from headway.cluster.routes.least_loaded import LeastLoadedRoute
from headway.cluster.sources import note_source
from headway.config import EngineConfig
from headway.engine.client import Output, Submit
from headway.engine.explain import RouteNote
from headway.engine.holder import RESTARTING, RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import AdaptersNow, BlockNews, Message, Reply, WatchBlocks
from headway.engine.process import CHILD, ChildCommand
from headway.engine.published import Published
from headway.engine.streams import INTERRUPTED, OutputStream
from headway.engine.supervision import Supervision
from headway.engine.supervisor import SupervisedEngine
from headway.errors import ConfigError, EngineDead, EngineError, EngineRestarting, RequestError
from headway.values.plan import Emission

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at a process that starts
_REMEMBERED = 4096  # requests whose replica is known after their end
_NONE_YET_S = 2.0  # when a request that finds no engine should come again


class FleetClient(Members):
    """Each open stream has its request with exactly one replica. `dead` is set once all replicas have given up."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        how: ChildCommand,
        rules: Supervision,
        *,
        route: Route | None = None,
        gate: GateConfig | None = None,
        max_buffer_bytes: int = 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(rules, max_buffer_bytes=max_buffer_bytes, clock=clock)
        self._route = route or CostRoute()
        self.gate = None if gate is None else EngineGate(gate, self)
        self.budget = RetryBudget()
        self._published: Published | None = None
        self._is_stale = False  # a replica has published since
        self._last_id = 0
        self._own = [SupervisedEngine(each, how, rules, self, name=str(at)) for at, each in enumerate(configs)]
        for engine in self._own:
            self._add(engine)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        num_replicas: int = 1,
        route: Route | None = None,
        gate: GateConfig | None = None,
        command: Sequence[str] = CHILD,
        log_level: str = "info",
        log_format: str = "text",
        rules: Supervision | None = None,
        max_buffer_bytes: int = 1024 * 1024,
    ) -> FleetClient:
        """Start the engine processes and return at once; needs no event loop. With a gate others may join them."""
        how = ChildCommand(command, log_level, log_format, told=told_to(gate, num_replicas))
        configs = split(config, num_replicas) if num_replicas else []
        return cls(configs, how, rules or Supervision(), route=route, gate=gate, max_buffer_bytes=max_buffer_bytes)

    @property
    def pid(self) -> int | None:
        """Of the first replica's process; None between two of them."""
        return self.replicas[0].engine.pid if self.replicas else None

    @property
    def recovering(self) -> float | None:
        """Seconds until requests are probably taken again; None while a replica takes them, or none was up yet."""
        if self._failure is not None or any(replica.engine.takes_requests for replica in self.replicas):
            return None
        default = _NONE_YET_S if self.gate is not None and self._info is not None else None
        return min((s for replica in self.replicas if (s := replica.engine.recovering) is not None), default=default)

    @property
    def published(self) -> Published | None:
        """What the replicas that take requests said last about waiting times, as if they were one engine."""
        if self._is_stale:
            self._is_stale = False
            said = [replica for replica in self.replicas if replica.engine.takes_requests and replica.published]
            if len(self.replicas) == 1:
                self._published = self.replicas[0].published
            else:
                self._published = add_up(said, self._last_id) if said else None
        return self._published

    @published.setter
    def published(self, value: Published | None) -> None:
        self._published = value  # the base class begins with None

    async def connect(self) -> None:
        """Begin to listen to the engines and to watch them, in the running event loop."""
        for engine in self._own:
            await engine.connect()
        if self.gate is not None:
            self.gate.open()

    def submit(self, submit: Submit) -> OutputStream:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        assert submit.id not in self._streams, f"request id {submit.id} is in use"
        self._last_id = max(self._last_id, submit.id)
        self.budget.offered()
        self._place(OpenRequest(submit, self._clock()), is_new=True)
        stream = self._streams[submit.id] = OutputStream(submit.id, self._give_up)
        return stream

    def _ready(self, entry: OpenRequest, like: RequestHolder | None) -> list[Replica]:
        """Replicas that take this request now; if there are none, those that will.

        EngineRestarting: there is none; RequestError: no pool of theirs holds it; EngineDead: none computes as `like`.
        """
        usable = [each for each in self.replicas if each.engine.failure is None]
        usable = [each for each in usable if not each.engine.is_draining] or usable
        usable = self._with_adapter(usable, entry.submit.adapter)
        if not usable:
            raise EngineRestarting("no engine is here; try again in a few seconds")
        usable = [each for each in usable if like is None or computes_as(like, each.engine)]
        if not usable:
            raise EngineDead("no engine that is left computes as the one that ended")
        num_tokens, most = tokens_held(entry.submit), max(room_of(each.engine) for each in usable)
        if num_tokens > most:
            what = (
                f"prompt and answer need the KV of {num_tokens} tokens; the largest pool of the engines here has {most}"
            )
            raise RequestError(f"{what}: ask for fewer tokens", param="max_tokens", code="context_length_exceeded")
        usable = [each for each in usable if room_of(each.engine) >= num_tokens]
        up = [each for each in usable if each.engine.takes_requests]
        now = self._clock()
        return [each for each in up if each.breaker.admits(now)] or up or usable

    def _place(
        self, entry: OpenRequest, *, is_new: bool, like: RequestHolder | None = None, but: Replica | None = None
    ) -> None:
        """Give a request to one of the replicas; with `like`, to one that computes as that engine did."""
        submit = entry.submit
        ready = self._ready(entry, like)
        ready = [each for each in ready if each is not but] or ready
        ready = list(handoff.candidates(entry, ready))
        if not self._ward.admits(submit.id):  # it waits for others, and engines that joined know when it may run
            ready = [each for each in ready if isinstance(each.engine, JoinedEngine)] or ready
        if submit.id in self._ward:
            ready = [each for each in ready if each.engine.may_have(submit.id)] or ready
        parent = None if submit.parent is None else self._home.get(submit.parent)
        scores: Mapping[str, float] = {}
        if parent is not None and parent in ready:
            replica, num_new, why = parent, 0, "the other answers to its prompt are there"
        elif len(ready) == 1 and self.gate is None:
            replica, num_new, why = ready[0], len(submit.tokens), "no other takes requests"
        else:
            replica, num_new = self._choose(submit, [each for each in ready if each.has_room] or ready)
            scores, why = getattr(self._route, "scores", {}), "the route chose it"
        why = why if is_new and but is None else f"another engine had it first; {why}"
        self._routed[submit.id] = RouteNote(replica.engine.name, why, scores)
        if submit.id in self._ward and not isinstance(replica.engine, JoinedEngine):
            replica.engine.suspect(submit.id)
            self._ward.ended(submit.id)
        handoff.arrive(replica.engine, entry)
        note_source(entry, replica, self.replicas, self._index)
        replica.engine.take(entry, is_new=is_new)
        replica.sent(submit.id, num_new)
        replica.breaker.sent(submit.id, self._clock())
        if is_new and parent is None:
            replica.claims[submit.id] = BlockClaim(len(submit.tokens) - num_new, replica.num_removals)
        self._home[submit.id] = replica
        self._is_stale = True

    def prompt_computed(self, engine: RequestHolder, entry: OpenRequest, output: Output) -> None:
        """It goes on in an engine that decodes, with the KV that this one keeps."""
        id, home = entry.submit.id, self._by_engine[engine]
        home.breaker.went_well(id)
        self._leave(id)
        self._check_claim(home, output)
        handoff.pass_on(engine, entry, output)
        self._place_again(entry, like=engine)

    def _place_again(self, entry: OpenRequest, *, like: RequestHolder | None, but: Replica | None = None) -> None:
        """Give what an engine had to another one; if there is none for it, that is its end."""
        try:
            self._place(entry, is_new=False, like=like, but=but)
        except EngineError as error:
            entry.release()
            id, what = entry.submit.id, "cut off" if entry.tokens else "not begun"
            self.request_ended(Output(id, finish="error", error=f"this answer was {what}: {error}", code=INTERRUPTED))

    def _choose(self, submit: Submit, replicas: Sequence[Replica]) -> tuple[Replica, int]:
        try:
            return self._route.choose(submit, replicas, self._index)
        except Exception:  # a plug-in's fault: no request is lost by it
            log.exception("the route failed; the least loaded replica gets the request")
            return LeastLoadedRoute().choose(submit, replicas, self._index)

    def _leave(self, id: int) -> None:
        """A request is over; which replica had it is remembered for a while."""
        home = self._home.pop(id, None)
        if home is not None:
            home.gone(id)
            home.breaker.left(id)
            self._was_at[id] = home
            if len(self._was_at) > _REMEMBERED:
                oldest = next(iter(self._was_at))
                del self._was_at[oldest]
                self._routed.pop(oldest, None)

    def abort(self, id: int, reason: str = "abort") -> None:
        home = self._home.get(id)
        if home is not None:
            home.engine.abort(id, reason)

    def end_all(self, reason: str = "abort") -> None:
        for id in list(self._streams):
            self.abort(id, reason)
            if id in self._home:  # its engine has been told and may never answer
                self._home[id].engine.forget(id)
                self.request_ended(Output(id, finish=reason))

    def _give_up(self, id: int) -> None:
        super()._give_up(id)
        home = self._home.get(id)
        self._leave(id)
        if home is not None:
            home.engine.forget(id)

    async def close(self, grace_s: float = 5.0) -> None:
        """End the engines of this machine, whatever state they are in, and the connections of others."""
        await asyncio.gather(*(replica.engine.close(grace_s) for replica in self.replicas))
        if self.gate is not None:
            await self.gate.close()
        self._fail(EngineDead("the engine was closed"))

    def _fail(self, failure: EngineDead | ConfigError) -> None:
        super()._fail(failure)
        self._home.clear()
        for replica in self.replicas:
            replica.engine.entries.clear()

    async def restart(self) -> None:
        """Replace the processes of this machine, one after the other; what each holds goes on in the others."""
        if not self._own:
            what = (
                "no engine here is a process of this server; those that joined are restarted where they run, by SIGTERM"
            )
            raise RequestError(what, code="conflict")
        for engine in self._own:
            log.info("replica %s gets another process", engine.name)
            engine.replace()
            while engine in self._by_engine and engine.failure is None and self._failure is None:
                if engine.takes_requests or (engine.is_draining and engine.is_up):
                    break
                await asyncio.sleep(_LOOK_S)

    def _owner(self) -> FleetClient:
        return self

    # What engines tell.

    def engine_up(self, engine: RequestHolder) -> None:
        replica = self._by_engine[engine]
        replica.renew()
        self._is_stale = True
        self._catch_up(engine)
        self._sum_info()
        if len(self.replicas) > 1 or self.gate is not None:
            engine.send(WatchBlocks())
            self._gather()
        self._note_start()

    def _note_start(self) -> None:
        """The fleet is ready once every replica of this machine is up or given up, and there is one to ask."""
        if self._info is not None and all(each.info is not None or each.failure is not None for each in self._own):
            self._news.set()

    def engine_lost(self, engine: RequestHolder) -> None:
        self._note_loss(self._by_engine[engine])
        self._is_stale = True
        for ticket, asked in self._asked.items():
            reply = self._replies.get(ticket)
            if asked is engine and reply is not None and not reply.done():
                reply.set_exception(EngineRestarting(RESTARTING))

    def engine_ended(self, engine: RequestHolder) -> None:
        """Requests go on elsewhere at once, if there is an engine that takes them."""
        if any(each.engine.takes_requests for each in self.replicas if each.engine is not engine):
            self._move(engine)

    def _move(self, engine: RequestHolder) -> None:
        """To replicas that take requests; what has begun only to those that compute as the engine did."""
        self._pass_on(engine, moved := engine.give_away())
        if moved:
            log.warning("%d requests of replica %s go on elsewhere", len(moved), engine.name)

    def _pass_on(self, engine: RequestHolder, moved: Sequence[OpenRequest]) -> None:
        home = self._by_engine[engine]
        for entry in moved:
            home.gone(entry.submit.id)
            home.claims.pop(entry.submit.id, None)
            self.budget.charge()
            finish = entry.finish(self.info.eos_ids) if entry.tokens else None
            if finish is not None:
                self.request_ended(entry.settle(Output(entry.submit.id, finish=finish), self._clock()))
            else:
                self._place_again(entry, like=engine if entry.tokens else None, but=home)

    def keeps_engine(self, engine: RequestHolder) -> bool:
        """One that was up before is tried again and again while another one serves."""
        return engine.info is not None and any(each.engine.takes_requests for each in self.replicas)

    def engine_failed(self, engine: RequestHolder, failure: EngineDead | ConfigError) -> None:
        others = [each for each in self.replicas if each.engine.failure is None]
        if isinstance(failure, ConfigError) or not (others or self.gate is not None):
            self._fail(failure)
            return
        log.error("replica %s is given up: %s; %d are left", engine.name, failure, len(others))
        self._note_start()
        if others:
            self._move(engine)
        for id in list(engine.entries):  # suspects of the crashes that it did not survive
            engine.forget(id)
            self.request_ended(Output(id, finish="error", error=str(failure)))

    def step_done(self, step: Emission[Output]) -> None:
        self._deliver_tokens(step)

    def request_ended(self, output: Output) -> None:
        home = self._home.get(output.id)
        if home is not None:
            if output.finish in ("stop", "length"):
                home.breaker.went_well(output.id)
            elif output.finish == "error" and output.code is None:
                home.breaker.failed(self._clock())
            self._leave(output.id)
            self._check_claim(home, output)
        self._deliver(output)

    def request_refused(self, engine: RequestHolder, entry: OpenRequest) -> bool:
        """An engine was full. Others may have room: another front has filled this one since it last said how it is."""
        home, id = self._by_engine[engine], entry.submit.id
        others = [each for each in self.replicas if each is not home and each.engine.takes_requests and each.has_room]
        if id not in self._streams or entry.tokens or not others or not self.budget.spend():
            return False
        self._leave(id)
        home.claims.pop(id, None)
        try:
            self._place(entry, is_new=not entry.num_resumes, but=home)
        except EngineError:  # none takes it after all: it ends with the first refusal
            return False
        return True

    def engine_said(self, engine: RequestHolder, message: Message) -> None:
        replica = self._by_engine[engine]
        if isinstance(message, Published):
            replica.take(message)
            self._is_stale = True
        elif isinstance(message, BlockNews):
            self._take_blocks(replica, message)
        elif isinstance(message, AdaptersNow):
            self._note_adapters(engine, message)
        if isinstance(message, Reply) and self._asked.get(message.ticket) is engine:
            self._dispatch((message,))

    def _remove(self, replica: Replica) -> None:
        super()._remove(replica)
        self._sum_info()  # the others have its limits no more
