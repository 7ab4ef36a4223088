"""Shares over a policy: lanes of tenants, tenants alone or lanes alone; the policy orders within the innermost.

What is paid for: a computed prompt token 1, one found in the cache 0.1, a generated token 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headway.core.policy import Policy, PolicyContext
from headway.core.queue import OrderedQueue
from headway.core.request import Account, Request
from headway.errors import ConfigError
from headway.policies._delegate import Delegate
from headway.policies._shares import ShareQueue

CACHED, GENERATED = 0.1, 2.0


def _lane_of(account: Account) -> str:
    return account.lane


def _tenant_of(account: Account) -> str:
    return account.tenant


class Shared(Delegate):
    """`lanes` names each lane's share, the most urgent first; the last is preempted first. None: there are none.

    With lanes take `Laned`, in which earlier lanes may also preempt requests of later ones.
    """

    has_shares: ClassVar[bool] = True

    def __init__(
        self,
        base: Policy,
        *,
        name: str = "this policy",
        fair: bool = True,
        weights: Mapping[str, float] | None = None,
        lanes: Mapping[str, float] | None = None,
    ) -> None:
        if base.is_global_order:
            raise ConfigError(
                f"policy {name!r} orders all waiting requests together; it cannot be used within lanes or tenants: "
                "take fcfs, sjf, ltr, edf, slo or hrrn, or leave out fair and lanes"
            )
        super().__init__(base)
        self._fair = fair
        self._weights = dict(weights or {})
        self._lanes = dict(lanes or {})
        self._place = {lane: place for place, lane in enumerate(self._lanes)}
        self._queue: OrderedQueue | None = None
        self._tenants: list[ShareQueue] = []

    @property
    def is_fair(self) -> bool:
        """True if tenants have shares."""
        return self._fair

    @property
    def lanes(self) -> Mapping[str, float]:
        """Their shares now, the most urgent first; empty if there are none."""
        return self._lanes

    def attach(self, context: PolicyContext) -> None:
        super().attach(context)
        self.base.attach(context)

    def queue(self) -> OrderedQueue:
        self._queue = ShareQueue(_lane_of, self._one_lane, self._lanes) if self._lanes else self._one_lane()
        return self._queue

    def _one_lane(self) -> OrderedQueue:
        if not self._fair:
            return self.base.queue()
        tenants = ShareQueue(_tenant_of, self.base.queue, self._weights)
        self._tenants.append(tenants)
        return tenants

    def reweigh(self, weights: Mapping[str, float] | None = None, lanes: Mapping[str, float] | None = None) -> None:
        """Other shares from now on; the lanes stay those there are."""
        if weights is not None:
            self._weights = dict(weights)
            for tenants in self._tenants:
                tenants.reweigh(weights)
        if lanes is not None and isinstance(self._queue, ShareQueue) and self._lanes:
            self._lanes = dict(lanes)
            self._queue.reweigh(lanes)

    def rank(self, req: Request) -> int:
        return self._place.get(req.lane, 0)

    preempts = Policy.preempts  # classes of the policy within are no claim on the slots of other tenants
    priority_victim_key = Policy.priority_victim_key

    def on_admit(self, req: Request) -> None:
        self.base.on_admit(req)
        if not req.num_preempted and self._queue is not None:
            self._queue.charge(req.account, req.num_prompt - req.num_cached + CACHED * req.num_cached)

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        self.base.on_tokens(account, num_in, num_out)
        if self._queue is not None:
            self._queue.charge(account, GENERATED * num_out)


class Laned(Shared):
    """Shares with lanes: a request that finds no slot or memory preempts one of a later lane that is over its share.

    The later lane must be over its share by more than the victim was given. So a preemption never puts a lane below
    its share, and lanes at their shares do not preempt each other. The victim goes back to its lane by its key; its KV
    stays in the prefix cache unless the memory is needed.
    """

    resumes_first: ClassVar[bool] = False

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        if self.rank(req) >= self.rank(victim) or not isinstance(self._queue, ShareQueue):
            return False
        ahead = self._queue.paid(victim.lane) - self._queue.paid(req.lane)
        return ahead * self._lanes.get(victim.lane, 1.0) > victim.num_prompt + GENERATED * victim.num_output
