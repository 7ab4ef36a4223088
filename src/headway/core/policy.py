"""What may be decided from outside: order, victims, pace and gate. The scheduler owns everything else.

A policy is one class in one file. Every hook has a default, and the defaults together make first come, first
served, so a policy overrides only what it is about. No hook is called per token, and none sees the whole queue.
docs/adding-a-policy.md lists them by the moment at which they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from headway.core.queue import Key, OrderedQueue, RankQueue
from headway.core.request import Account, Request
from headway.values.work import Costs, Work

__all__ = ["Gate", "Key", "Pacer", "Policy", "PolicyContext"]


@dataclass(slots=True)
class PolicyContext:
    """What a policy may ask about the engine it works for."""

    costs: Costs = field(default_factory=Costs)
    num_cached: Callable[[Request], int] = lambda _: 0  # prompt tokens of a request that are in the cache now
    num_computed: Callable[[Request], int] = lambda _: 0  # cells of a running request that are present
    block_size: int = 16

    def request_cost(self, req: Request) -> float:
        """Seconds of the engine that the whole request takes; before the first fit, its tokens count for seconds."""
        uncached = max(1, req.num_prompt - self.num_cached(req))
        if not self.costs.is_ready:
            return uncached + 4.0 * req.likely_output
        return self.costs.prefill(uncached) + self.costs.decode(req.num_prompt, req.likely_output)


class Policy:
    """Admission order and victim order are two things; both are total, since the request's id breaks ties."""

    is_global_order: ClassVar[bool] = False
    """True if it orders everybody who waits together: it cannot stand within lanes or tenants."""
    resumes_first: ClassVar[bool] = True
    """The displaced come back before anybody of their rank who never ran. False: they stand by key, for whom they gave
    way to has the same rank and must go before them. Who was preempted for lack of memory always comes back first."""
    keeps_arrival_order: ClassVar[bool] = True
    """False if requests that differ in nothing but arrival may be admitted in another order, as in LIFO."""
    backfill_depth: ClassVar[int] = 1
    """How many are tried for a seat when those before them need more memory than there is."""
    has_shares: ClassVar[bool] = False
    """True if tenants or lanes have shares: a queued request then holds back requests of its own account only."""
    keys_by_cache: bool = False
    """True if `key` depends on the cache: a waiting request is placed anew when the block it needs is published."""
    share_every: int = 0
    """Each so many-eth admission takes the oldest, so that nobody waits for ever; 0: the order itself prevents it."""
    boost_after: float = math.inf
    """Whoever has waited so many seconds goes first. Under lasting overload everybody has: see `RankQueue`."""
    context: PolicyContext = PolicyContext()
    """Replaced by `attach`; before that it knows nothing."""

    def __init__(self, *, share_every: int | None = None, boost_after: float | None = None) -> None:
        if share_every is not None:
            self.share_every = share_every
        if boost_after is not None:
            self.boost_after = boost_after

    def overrides(self, hook: str) -> bool:
        """False if this hook is the default: the scheduler then need not ask. Hooks are looked at once."""
        return getattr(type(self), hook) is not getattr(Policy, hook)

    def attach(self, context: PolicyContext) -> None:
        """Called once, before anything else, by the scheduler the policy works for."""
        self.context = context

    def queue(self) -> OrderedQueue:
        """An empty queue in this policy's order."""
        return RankQueue(self.key, self.share_every, self.boost_after, self.context.request_cost)

    def key(self, req: Request) -> Key:
        """Smaller is admitted sooner. Must not change while the request waits, but with `keys_by_cache`."""
        return (req.arrival,)

    def rank(self, req: Request) -> int:
        """Its class; smaller is more urgent. The preempted come first within their class, victims from the last."""
        return 0

    def latest_start(self, req: Request) -> float:
        """When the request becomes hopeless if it is not admitted before; it is then shed, wherever it stands."""
        return math.inf

    def is_infeasible(self, req: Request, now: float) -> bool:
        """True if admitting this request can no longer serve its purpose; it is then shed."""
        return False

    def waits(self, req: Request, work: Work) -> bool:
        """True if the next in line must wait although there is room: a step with this work would suffer from it."""
        return False

    def itl_target(self) -> float:
        """Seconds between two tokens that some running request was promised; chunks are cut to keep it."""
        return math.inf

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        """Who sits this step out, of those who have begun to answer; asked while somebody was promised a gap.

        With all of them, and all prompts under way, it would carry this work.
        """
        return ()

    def leaves_free(self, req: Request) -> float:
        """The share of all memory that must stay free for more urgent ones when this one sits down beside others."""
        return 0.0

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        """True if a running request must get up for the next in line, who finds no room."""
        return False

    def victim_key(self, req: Request) -> Key:
        """Among running requests of the last class the largest key is preempted first; the default leaves it open."""
        return ()

    def priority_victim_key(self, req: Request) -> Key:
        """Likewise, who gets up for the more urgent."""
        return self.victim_key(req)

    def on_admit(self, req: Request) -> None:
        """A request takes a seat; the first time, `req.num_cached` says what of its prompt is in the cache."""

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        """Once per step and account: prompt tokens computed and tokens generated for it."""

    def on_finish(self, req: Request) -> None:
        """A request has ended, with its outcome in `req.finish`."""


UNPACED = 1 << 30  # tokens: what a pacer says where no target binds, however much the step carries


class Pacer(Protocol):
    """How much one step may carry."""

    def tokens(self, work: Work, start: int, itl_target: float) -> int:
        """Prompt tokens that a step with this work may compute besides, in a chunk that begins at cell `start`.

        Somebody was promised a token after `itl_target` seconds.
        """

    def has_slot(self, work: Work) -> bool:
        """False if a step with this work, which has one more row than now, would be too long."""


class Gate(Protocol):
    """Whether anybody may be admitted now: static and dynamic batching are gates."""

    is_barrier: bool
    """True if all who were admitted together end together: whoever is done first waits for the others."""

    def num_slots(self, now: float, num_running: int, num_waiting: int, oldest: float) -> int:
        """How many requests may be admitted in this step; `oldest` is when the next in line arrived."""
