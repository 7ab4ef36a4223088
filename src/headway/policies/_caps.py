"""Caps over any policy: while others wait, one request holds a quarter of the slots at most, one tenant half of them.

A request may be many answers: prompts times n. One that holds as many slots as its cap is *over* it, and
- its waiting answers are parked: others go first, whatever the policy's order says of them;
- its running answers count as one class less urgent, so that chunks of others' prompts go first;
- it gives slots back, one for each waiting request that is not over a cap itself.

A slot only ever goes from a holder above its cap to one below, so that no two preempt each other in turns. While others
came within `HOLD_S`, one that is over its cap leaves an eighth of the slots free for the next of them: else each would
preempt, and what was preempted three times is protected. Alone, a request has every slot.

    queue     policy's order    a1 b1 a2 c1
    parked    by holder         hog: h17 h18 h19 …        back to the queue one by one, as its slots become fewer

Tens of thousands may wait for one holder, so a step parks `MOST_PARKED` at most. As long as others of that holder are
at the head of the policy's queue, the requests beside it go by arrival, one tenant's before the next one's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from headway.core.policy import Policy, PolicyContext
from headway.core.queue import OrderedQueue, RankQueue
from headway.core.request import Account, Request
from headway.policies._delegate import Delegate
from headway.values.states import State
from headway.values.work import Work

REQUEST_SHARE, TENANT_SHARE = 4, 2  # one in so many slots
MOST_PARKED = 128  # in one step; each takes 10 us
SPARE, HOLD_S = 8, 10.0  # one in so many slots stays free beside those over their caps, for so long after others came


class Holder:
    """A request or a tenant: who holds slots."""

    __slots__ = ("contended", "is_split", "name", "num_queued", "num_rows", "num_waiting", "share")

    def __init__(self, name: int | str, share: int) -> None:
        self.name = name
        self.share = share
        self.num_rows = 0
        self.num_waiting = 0  # in the queue and parked
        self.num_queued = 0  # of them in the policy's queue
        self.is_split = False  # some of those should have been parked too, but for `MOST_PARKED`
        self.contended = -math.inf  # when another one got a slot while this one had all it may have beside others


class Capped(Delegate):
    """Counts the slots of each holder; a request that is not part of a group counts for its tenant alone."""

    def __init__(self, base: Policy, slots: int) -> None:
        super().__init__(base)
        self.slots = slots
        self._holders: dict[int | str, Holder] = {}
        self._num_tenants = 0
        self._rows: dict[int, tuple[Holder, ...]] = {}  # by request that holds a slot
        self.now = 0.0  # of the step that is planned
        self._full: dict[int | str, Holder] = {}  # those with as many slots as their caps, or more
        # One that is preempted here is over its cap: it waits like the others of its holder.
        vars(self)["resumes_first"] = base.resumes_first and base.overrides("preempts")

    def overrides(self, hook: str) -> bool:
        if hook in ("preempts", "waits"):  # looking for a victim visits every row
            return self.base.overrides(hook) or self._is_crowded
        return self.base.overrides(hook) if hook == "queue" else super().overrides(hook)

    def attach(self, context: PolicyContext) -> None:
        super().attach(context)
        self.base.attach(context)

    def queue(self) -> OrderedQueue:
        return CappedQueue(self, self.base.queue())

    def rank(self, req: Request) -> int:
        if req.state is State.WAITING and req.id in self._rows:
            self._vacate(req)  # it was preempted
        return self.base.rank(req) + self._is_over(req, req.group) + self._is_over(req, req.tenant)

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        if self.base.preempts(req, victim, now):
            return True
        if self._is_over(req, req.group) or self.base.rank(req) > self.base.rank(victim):
            return False
        if req.tenant == victim.tenant:
            return req.group != victim.group and self._is_over(victim, victim.group)
        if self._is_over(req, req.tenant):
            return False
        return self._is_over(victim, victim.group) or self._is_over(victim, victim.tenant)

    def waits(self, req: Request, work: Work) -> bool:
        if self.base.overrides("waits") and self.base.waits(req, work):
            return True
        if not self._full or len(self._rows) < self.slots - self.slots // SPARE:
            return False
        return any(
            name in self._full and self.now - self._full[name].contended < HOLD_S for name in (req.group, req.tenant)
        )

    def on_admit(self, req: Request) -> None:
        self.base.on_admit(req)
        for full in self._full.values():
            own = req.group if full.share == REQUEST_SHARE else req.tenant
            if full.name != own and own not in self._full:
                full.contended = self.now
        self._rows[req.id] = holders = self.holders(req)
        for holder in holders:
            self._hold(holder, 1)

    def on_finish(self, req: Request) -> None:
        if req.id in self._rows:
            self._vacate(req)
        self.base.on_finish(req)

    def holders(self, req: Request) -> tuple[Holder, ...]:
        """Those whose slot it takes, the smaller first; new ones if need be."""
        tenant = self._holders.get(req.tenant) or self._enter(req.tenant, TENANT_SHARE)
        if not req.group:
            return (tenant,)
        return self._holders.get(req.group) or self._enter(req.group, REQUEST_SHARE), tenant

    def over(self, req: Request, num_waiting: int) -> Holder | None:
        """The holder whose waiting request this is and must stand back; `num_waiting` wait in all."""
        for name in (req.group, req.tenant):
            holder = self._holders.get(name)
            if holder is not None and self.stands_back(holder, num_waiting):
                return holder
        return None

    def stands_back(self, holder: Holder, num_waiting: int) -> bool:
        """True if its waiting requests must; `num_waiting` wait in all."""
        return holder.num_waiting < num_waiting and self.is_full(holder)

    def is_full(self, holder: Holder) -> bool:
        """True if it gets no other slot while others wait."""
        return holder.num_rows >= max(1, self.slots // holder.share)

    def forget(self, holder: Holder) -> None:
        """Drop it if nothing of it is left."""
        if not holder.num_rows and not holder.num_waiting and self._holders.pop(holder.name, None) is not None:
            self._num_tenants -= holder.share == TENANT_SHARE

    def _is_over(self, req: Request, name: int | str) -> bool:
        """True if the holder of this name is over its cap, or would be with this request."""
        holder = self._holders.get(name)  # asked for requests that may never come in: none is made
        is_new = req.state is State.WAITING
        return holder is not None and holder.num_rows + is_new > max(1, self.slots // holder.share)

    @property
    def _is_crowded(self) -> bool:
        """True if a holder is at its cap, and there are others it would be taken from for."""
        return any(full.share == REQUEST_SHARE or self._num_tenants > 1 for full in self._full.values())

    def _hold(self, holder: Holder, change: int) -> None:
        """It has a slot more or less."""
        holder.num_rows += change
        if self.is_full(holder):
            self._full[holder.name] = holder
        else:
            self._full.pop(holder.name, None)

    def _enter(self, name: int | str, share: int) -> Holder:
        holder = self._holders[name] = Holder(name, share)
        self._num_tenants += share == TENANT_SHARE
        return holder

    def _vacate(self, req: Request) -> None:
        for holder in self._rows.pop(req.id):
            self._hold(holder, -1)
            self.forget(holder)


class Lines:
    """Requests in the order in which they came, by tenant and, within it, by request of many answers."""

    def __init__(self) -> None:
        # OrderedDict, not dict: popping the front of a dict is O(n) once many fronts were popped.
        self._tenants: OrderedDict[Holder, OrderedDict[Holder, OrderedDict[int, Request]]] = OrderedDict()

    def enter(self, req: Request, holders: tuple[Holder, ...]) -> None:
        lines = self._tenants.setdefault(holders[-1], OrderedDict())
        lines.setdefault(holders[0], OrderedDict())[req.id] = req

    def leave(self, id: int, holders: tuple[Holder, ...]) -> None:
        lines = self._tenants[holders[-1]]
        del lines[holders[0]][id]
        if not lines[holders[0]]:
            del lines[holders[0]]
        if not lines:
            del self._tenants[holders[-1]]

    def first(self, stands_back: Callable[[Holder], bool]) -> Request | None:
        """The first of a holder that need not stand back. Few need to, since each has its cap in slots."""
        for tenant, lines in self._tenants.items():
            if not stands_back(tenant):
                for holder, line in lines.items():
                    if not stands_back(holder):
                        return next(iter(line.values()))
        return None


class CappedQueue:
    """The policy's queue, and beside it what is parked; a request is in one of them. `len` counts both."""

    def __init__(self, policy: Capped, queue: OrderedQueue) -> None:
        self.queue = queue
        self._policy = policy
        self._where: dict[int, tuple[tuple[Holder, ...], Holder | None]] = {}  # its holders; where it is parked
        self._parked: dict[Holder, RankQueue] = {}
        self._lines = Lines()  # of what is in the policy's queue
        self._num_parked = 0  # in this step

    def __len__(self) -> int:
        return len(self._where)

    def push(self, req: Request) -> None:
        self._policy.rank(req)  # one that was preempted holds no slot
        holders = self._policy.holders(req)
        for holder in holders:
            holder.num_waiting += 1
        at = next((holder for holder in holders if holder in self._parked), None)  # behind the others of its holder
        self._put(req, holders, at)

    def update(self, req: Request) -> None:
        at = self._where[req.id][1]
        (self.queue if at is None else self._parked[at]).update(req)

    def peek(self, now: float) -> Request | None:
        if now != self._policy.now:
            self._policy.now, self._num_parked = now, 0
        for holder in list(self._parked):
            if self._comes_back(holder):
                self._return(holder, now)
        while (head := self.queue.peek(now)) is not None:
            crowded = self._policy.over(head, len(self._where))
            if crowded is None:
                return head
            if self._num_parked == MOST_PARKED:
                crowded.is_split = True
                if (other := self._lines.first(self._stands_back)) is not None:
                    return other
                break  # all holders stand back: a slot is not left empty for that
            self._park(head, crowded)
        if not self._parked:
            return head
        return min(self._parked.items(), key=lambda entry: (entry[0].num_rows, str(entry[0].name)))[1].peek(now)

    def _stands_back(self, holder: Holder) -> bool:
        return self._policy.stands_back(holder, len(self._where))

    def _comes_back(self, holder: Holder) -> bool:
        """True if the first that is parked may go: alone, or before those of it that were never parked."""
        if not holder.num_queued:
            holder.is_split = False
        if holder.is_split:
            return not self._stands_back(holder)
        return not holder.num_queued and not self._policy.is_full(holder)

    def first(self, count: int, now: float) -> list[Request]:
        num = len(self._where)
        return [req for req in self.queue.first(count, now) if self._policy.over(req, num) is None]

    def forbids_backfill(self, now: float) -> bool:
        return not len(self.queue) or self.queue.forbids_backfill(now)

    def admit(self, req: Request) -> None:
        if self._leave(req.id) is None:
            self.queue.admit(req)

    def remove(self, id: int) -> bool:
        return id in self._where and (self._leave(id) is not None or self.queue.remove(id))

    def charge(self, account: Account, amount: float) -> None:
        self.queue.charge(account, amount)

    def requests(self) -> list[Request]:
        return sum((parked.requests() for parked in self._parked.values()), self.queue.requests())

    def _put(self, req: Request, holders: tuple[Holder, ...], at: Holder | None) -> None:
        """Park it there; in the queue if that is None."""
        self._where[req.id] = holders, at
        if at is not None:
            self._parked[at].push(req)
            return
        for holder in holders:
            holder.num_queued += 1
        self._lines.enter(req, holders)
        self.queue.push(req)

    def _park(self, req: Request, holder: Holder) -> None:
        holders, _ = self._where[req.id]
        self.queue.remove(req.id)
        self._unqueue(req.id, holders)
        self._num_parked += 1
        if holder not in self._parked:
            self._parked[holder] = RankQueue(self._policy.key)
        self._put(req, holders, holder)

    def _return(self, holder: Holder, now: float) -> None:
        """Its first goes back to the queue, where the policy's order decides."""
        req = self._parked[holder].peek(now)
        assert req is not None, "an empty queue is not kept"
        self._unpark(req.id, holder)
        self._put(req, self._where[req.id][0], None)

    def _unpark(self, id: int, holder: Holder) -> None:
        self._parked[holder].remove(id)
        if not len(self._parked[holder]):
            del self._parked[holder]

    def _unqueue(self, id: int, holders: tuple[Holder, ...]) -> None:
        """It leaves the queue, which is told by the caller."""
        self._lines.leave(id, holders)
        for holder in holders:
            holder.num_queued -= 1

    def _leave(self, id: int) -> Holder | None:
        """It waits no longer; where it was parked, which it is no more. The queue is left to the caller."""
        holders, at = self._where.pop(id)
        if at is None:
            self._unqueue(id, holders)
        else:
            self._unpark(id, at)
        for holder in holders:
            holder.num_waiting -= 1
            self._policy.forget(holder)
        return at


def uncapped(policy: Policy) -> Policy:
    """The policy within the caps."""
    return policy.base if isinstance(policy, Capped) else policy


def ordered(queue: OrderedQueue) -> OrderedQueue:
    """Likewise the queue."""
    return queue.queue if isinstance(queue, CappedQueue) else queue
