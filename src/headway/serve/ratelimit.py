"""Limits of a tenant: requests and tokens per minute as buckets that refill steadily, and requests under way.

A request is charged for its prompt and the longest answers it asks for when it is accepted, and for what it used when
it ends. One that asks for more than a minute's tokens needs a full bucket. Time is passed in; nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from headway.serve.keys import Tenant
from headway.serve.problem import LIMITED, Problem

Headers = list[tuple[bytes, bytes]]


class RateBucket:
    """At most `per_minute`, refilled by that much in a minute. It may owe: then it refills from below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        self._level = min(self.per_minute, self._level + max(0.0, now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much is in it, or until it is full."""
        return max(0.0, min(amount, self.per_minute) - self.level(now)) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take out, or with a negative amount give back."""
        self._level = min(self.per_minute, self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; the same share of it is left."""
        self._level = self.level(now) / self.per_minute * per_minute
        self.per_minute = per_minute

    def headers(self, kind: bytes, now: float) -> Headers:
        left = max(0, math.floor(self.level(now) + 1e-6))
        return [
            (b"x-ratelimit-limit-" + kind, b"%d" % self.per_minute),
            (b"x-ratelimit-remaining-" + kind, b"%d" % left),
            (b"x-ratelimit-reset-" + kind, _duration(self.wait(self.per_minute, now)).encode()),
        ]


class TenantLimits:
    """What one tenant has left. Limits that change keep what was used."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self._tenant = tenant
        self.num_open = 0
        self.requests = _bucket(tenant.requests_per_minute, now)
        self.tokens = _bucket(tenant.tokens_per_minute, now)

    def change(self, tenant: Tenant, now: float) -> None:
        self._tenant = tenant
        self.requests = _changed(self.requests, tenant.requests_per_minute, now)
        self.tokens = _changed(self.tokens, tenant.tokens_per_minute, now)

    def enter(self, now: float) -> None:
        """One more request; Problem 429 if that is too many."""
        most = self._tenant.concurrency
        if most is not None and self.num_open >= most:
            raise _too_many(f"{self.num_open} requests of this tenant are under way, its limit", 1.0)
        if self.requests is not None:
            if wait_s := self.requests.wait(1, now):
                raise _too_many(f"this tenant's limit is {self.requests.per_minute} requests per minute", wait_s)
            self.requests.take(1, now)
        self.num_open += 1

    def charge(self, num_tokens: int, now: float) -> int:
        """Tokens that a request may come to; what was charged. Problem 429 if there are not so many left."""
        if self.tokens is None:
            return 0
        amount = min(num_tokens, self.tokens.per_minute)
        if wait_s := self.tokens.wait(amount, now):
            what = f"this tenant's limit is {self.tokens.per_minute} tokens per minute"
            raise _too_many(f"{what}, and this request may come to {num_tokens}", wait_s)
        self.tokens.take(amount, now)
        return amount

    def headers(self, now: float) -> Headers:
        """What OpenAI's API says about limits, for those there are."""
        found: Headers = [] if self.requests is None else self.requests.headers(b"requests", now)
        return found + ([] if self.tokens is None else self.tokens.headers(b"tokens", now))


class Visit:
    """One request of a tenant, from its acceptance to its end. Without limits it does nothing."""

    def __init__(self, limits: TenantLimits | None, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._charged = 0
        self._used = 0

    def __enter__(self) -> Visit:
        if self._limits is not None:
            self._limits.enter(self._now())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._limits is not None:
            self._limits.num_open -= 1
            if self._limits.tokens is not None:
                self._limits.tokens.take(self._used - self._charged, self._now())

    def charge(self, num_tokens: int) -> None:
        """Before any of it is submitted: all tokens it may come to. Problem 429 if they are not left.

        A part that is submitted later is charged for already.
        """
        if self._limits is not None and not self._charged:
            self._charged = self._limits.charge(num_tokens, self._now())

    def settle(self, num_tokens: int) -> None:
        """At the end of each part: the tokens it came to."""
        self._used += num_tokens

    def headers(self) -> Headers:
        return [] if self._limits is None else self._limits.headers(self._now())


def _bucket(per_minute: int | None, now: float) -> RateBucket | None:
    return None if per_minute is None else RateBucket(per_minute, now)


def _changed(bucket: RateBucket | None, per_minute: int | None, now: float) -> RateBucket | None:
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _too_many(what: str, wait_s: float) -> Problem:
    wait = min(60, max(1, math.ceil(wait_s)))
    message = f"{what}; try again in {wait} s"
    return Problem(429, message, type=LIMITED, code="rate_limit_exceeded", headers={"retry-after": str(wait)})


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1e3 * seconds)}ms"
    if seconds < 60:
        return f"{math.ceil(10 * seconds) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
