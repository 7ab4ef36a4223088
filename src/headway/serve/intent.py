"""Scheduling fields of a request: tenant, tier, priority and objectives.

None of it changes a token of the answer; the scheduler alone reads it. Numbers of the interface are milliseconds,
those of the engine seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import RequestError
from headway.request_limits import LIMITS
from headway.serve.keys import Tenant
from headway.serve.namespace import Namespaces
from headway.serve.openai import SamplingRequest
from headway.values.params import NO_SLO, Slo

ONE_NAMESPACE = Namespaces()
_DAY_MS = 86_400_000.0
_OBJECTIVES = ("ttft_ms", "itl_ms", "deadline_ms")


class _Tier(NamedTuple):
    name: str  # as the response says it
    lane: str
    priority: int


TIERS: Mapping[str, _Tier] = {
    "auto": _Tier("default", "interactive", 0),
    "default": _Tier("default", "interactive", 0),
    "priority": _Tier("priority", "interactive", -1),
    "flex": _Tier("flex", "batch", 1),
    "batch": _Tier("batch", "batch", 1),
}


@dataclass(frozen=True, slots=True)
class Intent:
    """As the engine takes it; `tier` is reported in the response, None if the request named none."""

    tenant: str = ""
    lane: str = ""
    priority: int = 0
    slo: Slo = NO_SLO
    route: str = ""
    tier: str | None = None
    namespace: bytes = b""  # whose cached prefixes it may find
    speculates: bool = True


def intent_of(
    request: SamplingRequest,
    *,
    lanes: Sequence[str],
    key: str,
    route: str,
    tenant: Tenant | None = None,
    namespaces: Namespaces = ONE_NAMESPACE,
) -> Intent:
    """Check and translate; `lanes` are those the engine has.

    `tenant` is whose key it came with, where a file of keys says so; else it is told by `user` or by its `key`.
    """
    asked = request.service_tier
    tier = TIERS.get("default" if asked is None else asked)
    if tier is None:
        allowed = ", ".join(TIERS)
        raise RequestError(f"service_tier is {(asked or '')[:32]!r}; allowed: {allowed}", param="service_tier")
    priority = tier.priority if request.priority is None else request.priority
    if not -LIMITS.priority <= priority <= LIMITS.priority:
        allowed = f"{-LIMITS.priority} to {LIMITS.priority}, smaller is sooner"
        raise RequestError(f"priority is {priority}; allowed: {allowed}", param="priority")
    if request.speculation not in (None, "auto", "off"):
        raise RequestError(
            f"speculation is {request.speculation[:32]!r}; allowed: auto, as the server is set up, and off",
            param="speculation",
        )
    return Intent(
        tenant=_tenant(request.user, key) if tenant is None else tenant.name,
        lane=_lane(tier.lane, lanes),
        priority=priority,
        slo=_slo(request.slo),
        route=route,
        tier=None if asked is None else tier.name,
        namespace=namespaces.of("" if tenant is None else tenant.name, request.user),
        speculates=request.speculation != "off",
    )


def _tenant(user: str | None, key: str) -> str:
    if user:
        return user if len(user) <= LIMITS.tenant_chars else f"user-{_digest(user)}"
    return f"key-{_digest(key)}" if key else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _lane(wanted: str, lanes: Sequence[str]) -> str:
    if not lanes:
        return ""
    return wanted if wanted in lanes else lanes[0]


def _slo(asked: Mapping[str, float | None] | None) -> Slo:
    for name, value in (asked or {}).items():
        if name not in _OBJECTIVES:
            raise RequestError(f"slo has the key {name[:32]!r}; allowed: {', '.join(_OBJECTIVES)}", param="slo")
        if value is not None and not (math.isfinite(value) and 0 < value <= _DAY_MS):
            allowed = "milliseconds above 0, up to a day (86400000)"
            raise RequestError(f"slo.{name} is {value:g}; allowed: {allowed}", param=f"slo.{name}")
    seconds = {name: value / 1e3 for name, value in (asked or {}).items() if value is not None}
    return Slo(*map(seconds.get, _OBJECTIVES)) if seconds else NO_SLO
