"""What may be decided from outside: order, victims, pace and gate. The scheduler owns everything else.

A policy is one class with five hooks and no per-token callback. Each has a default that makes first come,
first served, so a policy overrides only what it is about.
"""

from __future__ import annotations

from typing import Protocol

from headway.core.request import Request

Key = tuple[float, ...]


class Policy:
    """Admission order and victim order are two things; both are total, since the request's id breaks ties."""

    def key(self, req: Request) -> Key:
        """Smaller is admitted sooner. Must not change while the request waits."""
        return (req.arrival,)

    def doomed(self, req: Request, now: float) -> bool:
        """True if admitting this request can no longer serve its purpose; it is then refused."""
        return False

    def victim_key(self, req: Request) -> Key:
        """The running request with the largest key is preempted first; the default is last come, first out."""
        return (req.arrival,)

    def on_tokens(self, tenant: str, num_in: int, num_out: int) -> None:
        """Once per step and tenant: prompt tokens computed and tokens generated for it."""

    def on_finish(self, req: Request) -> None:
        """A request has ended, with its outcome in `req.finish`."""


class Pacer(Protocol):
    """How much one step may carry."""

    def tokens(self, now: float, num_decode: int) -> int:
        """Tokens this step may compute beyond its decode rows."""


class Gate(Protocol):
    """Whether anybody may be admitted now: static and dynamic batching are gates."""

    def seats(self, now: float, num_running: int, num_waiting: int) -> int:
        """How many requests may be admitted in this step."""
