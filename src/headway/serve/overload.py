"""Refuses requests that would wait too long, in this process and at once: by what the engine published last.

The bound is on predicted waiting time, by lane, beside the count of `max_waiting`. Answers that were sent to the engine
and are not in its numbers yet are counted here. While several tenants wait, each may have its part of the queue: one
that fills it does not lock the others out, since they go before it once it holds its share of the slots.

A queue is there for bursts. One that is still full two seconds after the first refusal is standing: the load is above
what can be served, and a long queue makes every answer late and none more. Then the bound is a fortieth, at most a
twentieth of a second, until nothing had to be refused for a while. Clients that wait for their answers before they ask
again may keep a queue below the bound for ever.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable

from headway.engine.published import Published
from headway.errors import Overloaded, RequestError
from headway.serve.intent import Intent
from headway.serve.problem import shed

JITTER = 0.2
_BRIEF, _BRIEF_S = 40, 0.05  # a standing queue's bound is one in so many parts, and at most so many seconds
_CALM_S = 2.0  # without a refusal, after which the whole bound is back
_FULL_S = 2.0  # with refusals, after which it is a part
_SLACK = 0.5  # of a TTFT objective that may be spent waiting: the prompt takes time too


class _LaneBound:
    """How long the queue of a lane may be now."""

    __slots__ = ("_full", "_is_brief", "_refused")

    def __init__(self) -> None:
        self._is_brief = False
        self._full = self._refused = -math.inf  # the first and the last of refusals without a pause

    def of(self, most_s: float, now: float) -> float:
        is_standing = self._is_brief or self._refused - self._full > _FULL_S
        self._is_brief = is_standing and now - self._refused <= _CALM_S
        return min(most_s / _BRIEF, _BRIEF_S) if self._is_brief else most_s

    def refused(self, now: float) -> None:
        if now - self._refused > _CALM_S:
            self._full = now
        self._refused = now


class QueueGuard:
    """Knows which answers the engine has and has not begun. Without numbers of the engine nothing is refused."""

    def __init__(
        self, max_queue_s: float, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_queue_s = max_queue_s
        self._clock = clock
        self._bounds: dict[str, _LaneBound] = {}
        self._news: tuple[Published | None, float] = (None, 0.0)  # what was published last, and when it was first seen
        self._rng = rng or random.Random()
        self._waiting: dict[int, str] = {}  # answers without a token, by id, with their tenant
        self._by_tenant: dict[str, int] = {}
        self._sent: deque[int] = deque()  # ids that may not be in the engine's numbers yet

    def check(self, published: Published | None, intent: Intent, num_answers: int = 1) -> None:
        """Overloaded or Problem 429 if a request like this one is not taken now."""
        if published is None:
            return
        most = min(published.max_waiting, published.most_answers)
        if num_answers > most:
            allowed = f"up to {most}, as many as may wait"
            raise RequestError(f"the request asks for {num_answers} answers; allowed: {allowed}", param="n")
        now = self._clock()
        if published is not self._news[0]:
            self._news = published, now
        num_sent = max(0, self._num_unknown(published) - published.num_free)
        wait_s = published.waits.get(intent.lane, max(published.waits.values(), default=0.0))
        wait_s += num_sent * published.each_s
        if now - self._news[1] > wait_s + self.max_queue_s:
            return  # the engine would have said how it goes on
        num_above = published.num_waiting + num_sent + num_answers - published.max_waiting
        if num_answers <= published.group_cap:
            num_above -= published.num_excess
        if num_above > 0:
            what = f"{published.max_waiting} requests are waiting, the limit"
            raise self.overloaded(what, num_above * published.each_s)
        ttft = intent.slo.ttft
        if published.sheds and ttft is not None and wait_s > _SLACK * ttft:
            what = f"it would wait about {wait_s:.3g} s, too long for a first token within {ttft:g} s as its slo asks"
            raise shed(
                f"{what}; nothing was computed for it: retry later, or give it more time", wait_s - _SLACK * ttft
            )
        lane = self._bounds.setdefault(intent.lane, _LaneBound())
        bound_s = lane.of(self.max_queue_s, now)
        late_s = self._late(wait_s, bound_s, published, intent.tenant)
        if late_s > 0:
            lane.refused(now)
            why = "" if bound_s == self.max_queue_s else ", since the load has been too high for some time"
            raise self.overloaded(f"a request would wait about {wait_s:.3g} s; the limit is {bound_s:g} s{why}", late_s)

    def overloaded(self, what: str, wait_s: float) -> Overloaded:
        """The refusal, with a time to come back at which not all come back at once."""
        spread = 1 + JITTER * (2 * self._rng.random() - 1)
        return Overloaded(f"{what}; try again later", retry_after_s=max(1.0, wait_s) * spread)

    def sent(self, id: int, tenant: str) -> None:
        """An answer was submitted."""
        self._waiting[id] = tenant
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        self._sent.append(id)

    def begun(self, id: int) -> None:
        """Its first token came, or its end; asked twice, the second time changes nothing."""
        tenant = self._waiting.pop(id, None)
        if tenant is not None:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
        while self._sent and self._sent[0] not in self._waiting:
            self._sent.popleft()

    def _late(self, wait_s: float, bound_s: float, published: Published, tenant: str) -> float:
        """Seconds until the queue is as short as it has to be for this tenant."""
        num_tenants = len(self._by_tenant.keys() | {tenant})
        if num_tenants == 1 or wait_s > 2 * self.max_queue_s:
            return wait_s - bound_s
        own_s = self._by_tenant.get(tenant, 0) * published.each_s
        return min(wait_s - bound_s, own_s - bound_s / num_tenants)

    def _num_unknown(self, published: Published) -> int:
        while self._sent and self._sent[0] <= published.last_id:
            self._sent.popleft()
        return len(self._sent)
