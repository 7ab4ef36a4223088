"""The decisions that plug in: order, victims, pacing and batch barrier. The scheduler owns everything else.

A policy is one class in one file. Every hook has a default, and the defaults together make first come, first
served, so a policy overrides only what it is about. No hook is called per token, and none sees the whole queue.
docs/adding-a-policy.md lists them by the moment at which they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from headway.core.queue import Key, OrderedQueue, RankQueue
from headway.core.request import Account, Request
from headway.values.work import Costs, Work

__all__ = ["Gate", "Key", "Pacer", "Policy", "PolicyContext"]


@dataclass(slots=True)
class PolicyContext:
    """What a policy may ask: costs of steps, cached and computed tokens.

    Keys made at any times must compare. So `request_cost` has prices that stay while any request waits, and a row pays
    as if slots or memory were full of its like, not for the rows that run now. Until they are known it is in tokens.
    """

    costs: Costs = field(default_factory=Costs)
    num_cached: Callable[[Request], int] = lambda _: 0  # prompt tokens of a request that are in the cache now
    num_computed: Callable[[Request], int] = lambda _: 0  # tokens of a running request whose KV is present
    num_slots: int = 1
    capacity: float = math.inf  # tokens that fit into memory
    prices: Costs = field(init=False)

    def __post_init__(self) -> None:
        self.reprice()

    def reprice(self) -> None:
        """No request waits: prices are what steps cost now."""
        self.prices = copy(self.costs)

    def request_cost(self, req: Request) -> float:
        """Predicted engine seconds of the whole request; if they are not known, its weighted tokens."""
        uncached = max(1, req.num_prompt - self.num_cached(req))
        return self.prefill_cost(uncached) + self.decode_cost(req.num_prompt, req.likely_output)

    def prefill_cost(self, count: int) -> float:
        return self.prices.prefill(count) if self.prices.is_ready else float(count)

    def decode_cost(self, context: int, count: float) -> float:
        num_rows = min(self.num_slots, self.capacity / (context + count))
        return self.prices.decode(context, count, num_rows) if self.prices.is_ready else 4.0 * count


class Policy:
    """Admission order and victim order are independent; both are total, since the request's id breaks ties."""

    is_global_order: ClassVar[bool] = False
    """True if it orders all waiting requests together: it cannot be used within lanes or tenants."""
    resumes_first: ClassVar[bool] = True
    """A request preempted for a more urgent one resumes before requests of its rank that never ran. False: it goes by
    its key, since the request that preempted it may have the same rank. One preempted for memory always resumes first.
    """
    keeps_arrival_order: ClassVar[bool] = True
    """False if requests that differ in nothing but arrival may be admitted in another order, as in LIFO."""
    backfill_depth: ClassVar[int] = 1
    """Requests that are tried when the head does not fit into memory; 1: no backfill."""
    has_shares: ClassVar[bool] = False
    """True if tenants or lanes have shares: a queued request then holds back requests of its own account only."""
    keys_by_cache: bool = False
    """True if `key` depends on the cache: a waiting request is re-keyed when the block it needs next is published."""
    share_every: int = 0
    """Every k-th admission takes the oldest, against starvation; 0: the order itself prevents it."""
    boost_after: float = math.inf
    """A request that has waited so many seconds goes first. Under lasting overload all have: see `RankQueue`."""
    context: PolicyContext = PolicyContext()
    """Set by `attach`; until then costs are 0 and nothing is cached."""

    def __init__(self, *, share_every: int | None = None, boost_after: float | None = None) -> None:
        if share_every is not None:
            self.share_every = share_every
        if boost_after is not None:
            self.boost_after = boost_after

    def overrides(self, hook: str) -> bool:
        """False if this hook is the default: the scheduler then does not call it. Hooks are fixed once attached."""
        return getattr(type(self), hook) is not getattr(Policy, hook)

    def attach(self, context: PolicyContext) -> None:
        """Called once, before anything else, by the scheduler."""
        self.context = context

    def queue(self) -> OrderedQueue:
        """An empty queue in this policy's order."""
        return RankQueue(self.key, self.share_every, self.boost_after, self.context.request_cost)

    def key(self, req: Request) -> Key:
        """Smaller is admitted sooner. Must not change while the request waits, but with `keys_by_cache`."""
        return (req.arrival,)

    def rank(self, req: Request) -> int:
        """Its class; smaller is more urgent. Preempted requests resume first in it; victims are of the last class."""
        return 0

    def latest_start(self, req: Request) -> float:
        """When the request expires if it is not admitted before; it is then shed, wherever it waits."""
        return math.inf

    def is_infeasible(self, req: Request, now: float) -> bool:
        """True if this request can no longer meet its objective; it is then shed instead of admitted."""
        return False

    def waits(self, req: Request, work: Work) -> bool:
        """True if the head must wait although it fits: a step with this work would break an objective."""
        return False

    def itl_target(self) -> float:
        """The tightest ITL objective of a running request, in seconds; chunks are cut to keep it."""
        return math.inf

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        """Decoding requests that skip this step; called while there is an ITL target.

        `work` is that of the step with all decoding rows and all prompts under way.
        """
        return ()

    def leaves_free(self, req: Request) -> float:
        """Share of the memory that must stay free for more urgent requests when this one is admitted beside others."""
        return 0.0

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        """True if `victim`, which runs, is preempted for `req`, the head, which finds no slot or no memory."""
        return False

    def victim_key(self, req: Request) -> Key:
        """Of running requests of the last class the largest key is preempted first; default: by `Limits.victims`."""
        return ()

    def priority_victim_key(self, req: Request) -> Key:
        """Likewise, where the preemption is for a more urgent request."""
        return self.victim_key(req)

    def on_admit(self, req: Request) -> None:
        """A request is admitted; the first time, `req.num_cached` is the cached part of its prompt."""

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        """Once per step and account: prompt tokens computed and tokens generated for it."""

    def on_finish(self, req: Request) -> None:
        """A request has ended, with its outcome in `req.finish`."""


UNPACED = 1 << 30  # tokens: what a pacer returns where no target binds


class Pacer(Protocol):
    """How much one step may carry."""

    def tokens(self, work: Work, start: int, itl_target: float) -> int:
        """Prompt tokens that a step with this work may compute besides, in a chunk that begins at token `start`.

        `itl_target` is the tightest ITL objective of a running request, in seconds.
        """

    def has_slot(self, work: Work) -> bool:
        """False if a step with this work, which has one more row than now, would exceed the target."""


class Gate(Protocol):
    """When requests may be admitted: static and dynamic batching are gates."""

    is_barrier: bool
    """True if requests that were admitted together are reported together, when the last of them has ended."""

    def num_slots(self, now: float, num_running: int, num_waiting: int, oldest: float) -> int:
        """Requests that may be admitted in this step; `oldest` is the arrival of the head."""
