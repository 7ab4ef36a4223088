"""Refuses requests that would wait too long, in this process and at once: by what the engine published last.

The bound is on predicted waiting time, by lane, beside the count of `max_waiting`. Answers that were sent to the engine
and are not in its numbers yet are counted here. While several tenants wait, each may have its part of the queue: one
that fills it does not lock the others out, since they go before it once it holds its share of the slots.
"""

from __future__ import annotations

import random
from collections import deque

from headway.engine.published import Published
from headway.errors import Overloaded
from headway.serve.intent import Intent
from headway.serve.problem import shed

JITTER = 0.2
_SLACK = 1.2  # by how much a predicted wait may miss an objective


class QueueGuard:
    """Knows which answers the engine has and has not begun. Without numbers of the engine nothing is refused."""

    def __init__(self, max_queue_s: float, rng: random.Random | None = None) -> None:
        self.max_queue_s = max_queue_s
        self._rng = rng or random.Random()
        self._waiting: dict[int, str] = {}  # answers without a token, by id, with their tenant
        self._by_tenant: dict[str, int] = {}
        self._sent: deque[int] = deque()  # ids that may not be in the engine's numbers yet

    def check(self, published: Published | None, intent: Intent) -> None:
        """Overloaded or Problem 429 if a request like this one is not taken now."""
        if published is None:
            return
        num_sent = max(0, self._num_unknown(published) - published.num_free)
        wait_s = published.waits.get(intent.lane, max(published.waits.values(), default=0.0))
        wait_s += num_sent * published.each_s
        num_above = published.num_waiting + num_sent + 1 - published.max_waiting
        if num_above > 0:
            what = f"{published.max_waiting} requests are waiting, the limit"
            raise self.overloaded(what, num_above * published.each_s)
        ttft = intent.slo.ttft
        if published.sheds and ttft is not None and wait_s > _SLACK * ttft:
            what = f"the first token would come after more than {wait_s:.3g} s, later than this request's slo allows"
            raise shed(f"{what}; nothing was computed for it: retry later, or give it more time", wait_s - ttft)
        late_s = self._late(wait_s, published, intent.tenant)
        if late_s > 0:
            what = f"a request would wait about {wait_s:.3g} s; the limit is {self.max_queue_s:g} s"
            raise self.overloaded(what, late_s)

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

    def _late(self, wait_s: float, published: Published, tenant: str) -> float:
        """Seconds until the queue is as short as it has to be for this tenant."""
        late_s = wait_s - self.max_queue_s
        num_tenants = len(self._by_tenant.keys() | {tenant})
        if num_tenants == 1 or wait_s > 2 * self.max_queue_s:
            return late_s
        own_s = self._by_tenant.get(tenant, 0) * published.each_s
        return min(late_s, own_s - self.max_queue_s / num_tenants)

    def _num_unknown(self, published: Published) -> int:
        while self._sent and self._sent[0] <= published.last_id:
            self._sent.popleft()
        return len(self._sent)
