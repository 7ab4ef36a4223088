"""One engine of a fleet: what it said last, and what it was sent since. Pure but for the engine that it names.

The load of a replica is the engine's own numbers plus the requests that were sent and are not in these numbers yet;
without the latter a burst would go to one replica, since numbers are milliseconds old.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headway.cluster.breaker import Breaker
from headway.cluster.fetch_config import ReplicaFetching
from headway.cluster.gate import GateConfig
from headway.config import EngineConfig
from headway.engine.client import Stats, Submit
from headway.engine.holder import RequestHolder
from headway.engine.published import Published
from headway.errors import ConfigError


class BlockClaim(NamedTuple):
    """What an engine said to have of a prompt when a request was sent."""

    num_tokens: int
    num_removals: int  # blocks that it had said to have no more until then


class Replica:
    """`unknown` are requests that were sent and are not in `published`, with the prompt tokens to compute for each."""

    def __init__(self, number: int, engine: RequestHolder) -> None:
        self.number = number
        self.engine = engine
        self.published: Published | None = None
        self.unknown: dict[int, int] = {}
        self._num_unknown_tokens = 0
        self.breaker = Breaker()
        self.claims: dict[int, BlockClaim] = {}  # by open request
        self.num_removals = 0  # blocks that its engine said to have no more
        self.num_false = 0  # claims in a row that were not true

    @property
    def health(self) -> str:
        """In a word: up, draining, probing, starting, away or failed."""
        engine = self.engine
        if engine.failure is not None:
            return "failed"
        if not engine.is_up:
            return "starting" if engine.info is None else "away"
        if engine.is_draining:
            return "draining"
        return "up" if self.breaker.state == "closed" else "probing"

    @property
    def num_requests(self) -> int:
        """Requests that run or wait there."""
        said = self.published
        return len(self.unknown) + (0 if said is None else said.num_running + said.num_waiting)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens that are still to be computed there."""
        return self._num_unknown_tokens + (0 if self.published is None else self.published.num_prefill)

    @property
    def num_queued(self) -> int:
        """Requests that wait there, or will when those that were sent have arrived."""
        said = self.published or Published()
        return said.num_waiting + max(0, len(self.unknown) - said.num_free)

    @property
    def has_room(self) -> bool:
        """True if one more request may wait there, as far as is known."""
        return self.published is None or self.num_queued < self.published.max_waiting

    @property
    def wait_s(self) -> float:
        """Seconds that a request would wait there, by the lane that waits longest."""
        said = self.published or Published()
        return max(said.waits.values(), default=0.0) + (self.num_queued - said.num_waiting) * said.each_s

    def sent(self, id: int, num_new: int) -> None:
        """A request was sent, of whose prompt so many tokens are to be computed."""
        self.unknown[id] = num_new
        self._num_unknown_tokens += num_new

    def gone(self, id: int) -> None:
        """A request has ended or left."""
        self._num_unknown_tokens -= self.unknown.pop(id, 0)

    def take(self, published: Published) -> None:
        """The engine said how it is."""
        self.published = published
        for id in [id for id in self.unknown if id <= published.last_id]:
            self.gone(id)

    def renew(self) -> None:
        """Its engine is gone, or new: what was said is not true any more."""
        self.claims.clear()
        self.num_false = 0
        self.published = None
        self.unknown.clear()
        self._num_unknown_tokens = 0


def add_up(replicas: Sequence[Replica], last_id: int) -> Published:
    """What several replicas said as if they were one engine, which knows all that was sent up to `last_id`.

    Waits are those of the replica with the shortest: a request goes there, or where it has less to compute.
    """
    said = [replica.published or Published() for replica in replicas]
    at = min(range(len(replicas)), key=lambda number: replicas[number].wait_s)
    best, more_s = said[at], replicas[at].wait_s - max(said[at].waits.values(), default=0.0)
    return replace(
        best,
        last_id=last_id,
        num_free=sum(max(0, each.num_free - len(one.unknown)) for one, each in zip(replicas, said, strict=True)),
        num_waiting=sum(replica.num_queued for replica in replicas),
        max_waiting=sum(each.max_waiting for each in said),
        most_answers=min(each.max_waiting for each in said),
        each_s=best.each_s / len(said),
        waits={lane: wait + more_s for lane, wait in best.waits.items()},
        num_excess=sum(each.num_excess for each in said),
        num_running=sum(each.num_running for each in said),
        num_prefill=sum(each.num_prefill for each in said),
    )


def split(config: EngineConfig, num_replicas: int) -> list[EngineConfig]:
    """The configurations of so many engines on one machine: they share its cores, and each writes its own step log."""
    roles = config.scheduler.role.split(",")
    if len(roles) not in (1, num_replicas):
        raise ConfigError(f"role names {len(roles)} roles; allowed: one, or one for each of {num_replicas} replicas")
    if num_replicas == 1:
        return [config]
    threads = config.model.threads or max(1, len(os.sched_getaffinity(0)) // num_replicas)
    model = replace(config.model, threads=threads)
    log = config.scheduler.step_log
    logs = [None if log is None else f"{log}.{number}" for number in range(num_replicas)]
    roles = roles if len(roles) > 1 else roles * num_replicas
    parts = [replace(config.scheduler, step_log=log, role=role) for log, role in zip(logs, roles, strict=True)]
    return [replace(config, model=model, scheduler=part) for part in parts]


def told_to(gate: GateConfig | None, num_replicas: int) -> bytes:
    """What each of so many engines of one server is told of KV to fetch; nothing: there are no others."""
    if gate is None:
        return ReplicaFetching().pack() if num_replicas > 1 else b""
    if gate.host in ("0.0.0.0", "::"):  # by which of its addresses peers reach this machine is not known
        return ReplicaFetching(key=gate.key).pack()
    host = f"[{gate.host}]" if ":" in gate.host else gate.host
    return ReplicaFetching(f"{host}:0", gate.key, gate.cert, gate.cert_key).pack()


def computes_as(one: RequestHolder, other: RequestHolder) -> bool:
    """True if both give the same tokens to the same request."""
    if one.info is None or other.info is None:
        return False
    return one.info.computes_with() == other.info.computes_with()


def tokens_held(submit: Submit) -> int:
    """Of how many tokens an engine has the KV when it gives the last one, which needs none."""
    num_prompt = submit.num_prompt or len(submit.tokens)
    return max(num_prompt, num_prompt + submit.params.max_tokens - 1)


def room_of(engine: RequestHolder) -> float:
    """Tokens that its pool holds; without end while that is not known."""
    return math.inf if engine.info is None else engine.info.num_blocks * engine.info.block_size


def sum_stats(found: Sequence[Stats]) -> Stats:
    """The numbers of several engines as those of one."""
    total = found[0]
    for stats in found[1:]:
        changes: dict[str, object] = {}
        for name in Stats.__slots__:
            one, two = getattr(total, name), getattr(stats, name)
            if isinstance(one, dict):
                changes[name] = {key: one.get(key, 0) + two.get(key, 0) for key in one.keys() | two.keys()}
            else:
                changes[name] = one + two
        total = replace(total, **changes)  # type: ignore[arg-type]
    return total
