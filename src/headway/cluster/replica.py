"""One engine of a fleet: what it said last, and what it was sent since. Pure but for the engine that it names.

The load of a replica is the engine's own numbers plus the requests that were sent and are not in these numbers yet;
without the latter a burst would go to one replica, since numbers are milliseconds old.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from headway.config import EngineConfig
from headway.engine.published import Published
from headway.engine.supervisor import SupervisedEngine


class Replica:
    """`unknown` are requests that were sent and are not in `published`, with the prompt tokens to compute for each."""

    def __init__(self, number: int, engine: SupervisedEngine) -> None:
        self.number = number
        self.engine = engine
        self.published: Published | None = None
        self.unknown: dict[int, int] = {}
        self._num_unknown_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests that run or wait there."""
        said = self.published
        return len(self.unknown) + (0 if said is None else said.num_running + said.num_waiting)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens that are still to be computed there."""
        return self._num_unknown_tokens + (0 if self.published is None else self.published.num_prefill)

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
        self.published = None
        self.unknown.clear()
        self._num_unknown_tokens = 0


def add_up(replicas: Sequence[Replica], last_id: int) -> Published:
    """What several replicas said as if they were one engine; requests go to the one with the shortest wait."""
    said = [replica.published or Published() for replica in replicas]
    unknown = [id for replica in replicas for id in replica.unknown]
    best = min(said, key=lambda each: max(each.waits.values(), default=0.0))
    return replace(
        best,
        last_id=min(unknown) - 1 if unknown else last_id,
        num_free=sum(each.num_free for each in said),
        num_waiting=sum(each.num_waiting for each in said),
        max_waiting=sum(each.max_waiting for each in said),
        each_s=best.each_s / len(said),
        num_excess=sum(each.num_excess for each in said),
        num_running=sum(each.num_running for each in said),
        num_prefill=sum(each.num_prefill for each in said),
    )


def split(config: EngineConfig, num_replicas: int) -> list[EngineConfig]:
    """The configurations of so many engines on one machine: they share its cores, and each writes its own step log."""
    if num_replicas == 1:
        return [config]
    threads = config.model.threads or max(1, len(os.sched_getaffinity(0)) // num_replicas)
    model = replace(config.model, threads=threads)
    log = config.scheduler.step_log
    logs = [None if log is None else f"{log}.{number}" for number in range(num_replicas)]
    return [replace(config, model=model, scheduler=replace(config.scheduler, step_log=each)) for each in logs]
