"""Which engines a fleet has: they join and leave while it runs, and one that says what is not true is sent away.

An engine is known again by its instance while its process lives, and by its name after that, so that a replica keeps
its place in tables and metrics. Only engines of equal model and limits are taken in: the same request must get the same
answer wherever it goes. Those that compute with other kernels are taken, and answers that have begun stay apart
(`computes_as`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from headway.cluster.adapters import FleetAdapters
from headway.cluster.joined import EngineLink, JoinedEngine
from headway.cluster.replica import Replica, tokens_held
from headway.cluster.ward import Ward
from headway.engine.client import EngineInfo, Output
from headway.engine.holder import RequestHolder
from headway.engine.messages import BlockNews, Dismiss, Joining
from headway.engine.streams import HOLD_S
from headway.engine.supervision import EngineOwner, Supervision
from headway.engine.supervisor import SupervisedEngine
from headway.engine.wire import MAX_FRAME_BYTES
from headway.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

MOST_ENGINES = 1024
AWAY_S = 60.0  # after so long an engine that left is forgotten
_MOST_FALSE = 3  # claims in a row about blocks that were not there
_LOOK_S = 0.02
_SAME = ("identity", "max_model_len", "vocab_size", "block_size", "eos_ids", "lanes")


class Members(FleetAdapters):
    """A replica has a number, which is free again once it is forgotten, and an engine."""

    def __init__(
        self, rules: Supervision, *, max_buffer_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._rules = rules
        self._clock = clock
        self._by_engine: dict[RequestHolder, Replica] = {}
        self._ward = Ward(self._resume_suspects, clock)
        self._lost_at = -math.inf  # when an engine ended last

    def _add(self, engine: RequestHolder) -> Replica:
        taken = {each.number for each in self.replicas}
        replica = Replica(next(at for at in range(len(taken) + 1) if at not in taken), engine)
        self.replicas = sorted([*self.replicas, replica], key=lambda each: each.number)
        self._by_engine[engine] = replica
        return replica

    def _remove(self, replica: Replica) -> None:
        self._index.drop(replica.number)
        self.replicas = [each for each in self.replicas if each is not replica]
        del self._by_engine[replica.engine]
        self._own = [each for each in self._own if each is not replica.engine]

    def _note_loss(self, replica: Replica) -> None:
        """Its engine has ended or is away: what is known of it is not true any more."""
        self._lost_at = self._clock()
        replica.renew()
        replica.breaker.failed(self._lost_at)
        self._index.drop(replica.number)

    @property
    def hold_s(self) -> float:
        """Where engines restart beside others there is one again soon, unless the last has been gone for `HOLD_S`."""
        if len(self.replicas) == 1 and not self.joined():
            return 0.0
        return max(0.0, self._lost_at + HOLD_S - self._clock())

    def _owner(self) -> EngineOwner:
        """Who is told what becomes of an engine."""
        raise NotImplementedError

    def _move(self, engine: RequestHolder) -> None:
        """Have requests of an engine go on elsewhere."""
        raise NotImplementedError

    def request_ended(self, output: Output) -> None:
        raise NotImplementedError

    # Engines that dial in.

    def joined(self) -> list[JoinedEngine]:
        """All engines that dialled in, away or not."""
        return [each.engine for each in self.replicas if isinstance(each.engine, JoinedEngine)]

    def join(self, link: EngineLink, join: Joining) -> JoinedEngine:
        """A replica from now on, or again; ConfigError: it does not fit the others."""
        engine = self._known(join)
        self._require_fit(join, engine)
        if engine is None:
            if len(self.replicas) >= MOST_ENGINES:
                raise ConfigError(f"this front has {MOST_ENGINES} engines, the limit; use another front")
            engine = JoinedEngine(
                join, self._owner(), self._rules, self._ward, max_pending=MAX_FRAME_BYTES, clock=self._clock
            )
            engine.name, engine.settings = self._free_name(join.name), dict(self._settings)
            self._add(engine)
        elif engine.link is not None:
            engine.lost(engine.link, "it has dialled again", is_crash=False)
        log.info("engine %s joins from %s", engine.name, link.where)
        engine.attach(link, join)
        return engine

    def _known(self, join: Joining) -> JoinedEngine | None:
        for engine in self.joined():
            if engine.instance == join.instance:
                return engine
        for engine in self.joined():
            if engine.link is None and engine.joined_as == join.name and _holds_all(join.info, engine):
                return engine
        return None

    def _free_name(self, name: str) -> str:
        names = {each.engine.name for each in self.replicas}
        names_to_try = (name if at == 1 else f"{name}-{at}" for at in range(1, len(names) + 2))
        return next(each for each in names_to_try if each not in names)

    def _require_fit(self, join: Joining, itself: JoinedEngine | None) -> None:
        """Equal to the engines that are here now; if there are none, to those that were, while requests wait."""
        engines = [each.engine for each in self.replicas]
        gone = [each for each in self.joined() if each.link is None]
        here = [each for each in engines if each is not itself and each not in gone and each.failure is None]
        known = next((each.info for each in [*here, *gone] if each.info and (each in here or each.entries)), None)
        clash = None if known is None else _clash(known, join.info)
        if clash is not None:
            raise ConfigError(clash)
        for each in gone:
            if each is not itself and not each.entries and each.info and _clash(each.info, join.info) is not None:
                log.info("engine %s is forgotten: it is away, and another kind of engine joins", each.name)
                self._remove(self._by_engine[each])

    def look(self, passed_s: float) -> None:
        """So much time has passed: drop engines that stand still, forget those that are away for long."""
        now = self._clock()
        self._ward.look()
        for engine in self.joined():
            engine.look(passed_s)
            if engine.link is None and now - engine.away_since > AWAY_S:
                for id in list(engine.entries):
                    engine.forget(id)
                    what = f"its engine left, and none that can go on with it was here within {AWAY_S:g} s"
                    self.request_ended(Output(id, finish="error", error=what))
                log.info("engine %s is forgotten", engine.name)
                self._remove(self._by_engine[engine])

    def _resume_suspects(self) -> None:
        for engine in self.joined():
            engine.resume()

    def _gather(self) -> None:
        """One more takes requests: what engines that are gone hold need not wait for their next process."""
        for each in self.replicas:
            if each.engine.is_between:
                self._move(each.engine)
        self._spread()

    def _spread(self) -> None:
        """Engines share what none of them has gone on with: else the first one that is back would keep all of it."""
        up = [each for each in self.joined() if each.takes_requests]
        found = {each: each.not_begun() for each in up}
        share = -(-sum(map(len, found.values())) // max(1, len(up)))
        for engine, ids in found.items():
            self._pass_on(engine, engine.take_back(ids[share:]))

    # One replica less.

    async def drain(self, name: str, grace_s: float = 30.0) -> None:
        """Remove a replica: it gets no new requests, may finish those it has, and the rest goes on elsewhere.

        RequestError: no other takes requests, from the start or since one ended; it stays and takes them again.
        """
        replica = next((each for each in self.replicas if each.engine.name == name), None)
        if replica is None:
            names = ", ".join(each.engine.name for each in self.replicas)
            raise RequestError(f"there is no replica {name!r}; there are: {names}", param="name", code="not_found")
        engine = replica.engine
        until = time.monotonic() + grace_s
        self._require_other(replica)
        engine.is_draining = True
        while engine.entries and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
            if engine not in self._by_engine:
                return
            self._require_other(replica)
        if isinstance(engine, SupervisedEngine):
            engine.retire()
        self._move(engine)
        if isinstance(engine, JoinedEngine):
            engine.dismiss("this replica was removed")
        else:
            await engine.close()
        for id in list(engine.entries):  # suspects that it kept
            engine.forget(id)
            self.request_ended(Output(id, finish="error", error="its replica was removed"))
        if engine in self._by_engine:
            self._remove(replica)
        log.info("replica %s was removed", name)

    def _require_other(self, replica: Replica) -> None:
        """RequestError: no other replica takes requests; this one does then, and what ended ones held."""
        if any(each.engine.takes_requests for each in self.replicas if each is not replica):
            return
        engine = replica.engine
        if engine.is_draining:
            engine.is_draining = False
            log.warning("replica %s is not removed: no other one takes requests any more", engine.name)
            if engine.takes_requests:
                self._gather()
        what = f"replica {engine.name!r} is the only one that takes requests; add one first"
        raise RequestError(what, code="conflict")

    # What engines say of their blocks.

    def _take_blocks(self, replica: Replica, news: BlockNews) -> None:
        if news.is_whole:
            self._index.drop(replica.number)
        replica.num_removals += len(news.removed)
        self._index.change(replica.number, news.added, news.removed)

    def _check_claim(self, replica: Replica, output: Output) -> None:
        """Whether an engine had the blocks that it said it had; one that has not, again and again, is sent away."""
        claim = replica.claims.pop(output.id, None)
        if output.finish not in ("stop", "length") or claim is None or not claim.num_tokens:
            return
        if claim.num_removals != replica.num_removals or output.preemptions:
            return
        replica.num_false = 0 if output.cached_tokens >= claim.num_tokens else replica.num_false + 1
        engine = replica.engine
        if replica.num_false >= _MOST_FALSE and isinstance(engine, JoinedEngine) and engine.link is not None:
            replica.num_false = 0
            reason = f"it announced blocks that it did not have, {_MOST_FALSE} times in a row"
            engine.link.send(Dismiss(reason, is_refusal=True))
            engine.lost(engine.link, reason, is_crash=False, is_asked=True)


def _clash(known: EngineInfo, info: EngineInfo) -> str | None:
    """Why an engine cannot be in one fleet with another."""
    for name in _SAME:
        ours, theirs = getattr(known, name), getattr(info, name)
        if ours != theirs and not (name in ("eos_ids", "lanes") and list(ours) == list(theirs)):
            return _misfit(name, known, info)
    for name in known.adapters.keys() & info.adapters.keys():
        ours, theirs = known.adapters[name], info.adapters[name]
        if ours != theirs:
            return f"its adapter {name!r} has the digest {theirs}; the engines of this front have {ours}"
    return None


def _holds_all(info: EngineInfo, engine: RequestHolder) -> bool:
    """True if the pool of an engine has room for each request that another one holds."""
    room = info.num_blocks * info.block_size
    return all(tokens_held(entry.submit) <= room for entry in engine.entries.values())


def _misfit(name: str, ours: EngineInfo, theirs: EngineInfo) -> str:
    if name == "identity":
        return (
            f"it has another model, number format or block size than the engines of this front: {theirs.model!r} "
            f"({_short(theirs.identity)}), not {ours.model!r} ({_short(ours.identity)})"
        )
    return f"its {name} is {getattr(theirs, name)!r}; the engines of this front have {getattr(ours, name)!r}"


def _short(identity: str) -> str:
    """With what follows the digest of the files: number formats, block size; one of these may be all that differs."""
    digest, colon, rest = identity.partition(":")
    return f"{digest[:12]}{colon}{rest}" or "unknown"
