"""How many connections there may be: in all, from one address, and a few more that may ask for /health alone.

A process that has used up its descriptors can accept nothing, not even the probe that would have it replaced. So
descriptors for probes are kept apart from those of requests. It counts, and knows neither sockets nor HTTP.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum

log = logging.getLogger(__name__)

PROBES = frozenset({b"/health", b"/ready"})
"""Paths that are answered on connections beyond the limits."""
_RESERVED = 32  # connections beyond the limits, at a time
_OTHER_DESCRIPTORS = 64  # the engine, templates, logs, model files
_MOST = 4096
_LOG_EVERY_S = 10.0


class Standing(Enum):
    """What a new connection may do."""

    FULL = "full"
    PROBE = "probe"  # ask for /health and /ready, once
    NONE = "none"  # it is closed at once


class ConnectionLimits:
    """Counts connections from `opened` to `closed`, which are called in pairs with the same address and standing."""

    def __init__(self, total: int, per_address: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.per_address = per_address
        self._clock = clock
        self._num_full = 0
        self._num_probes = 0
        self._by_address: Counter[str] = Counter()
        self._logged_at: float | None = None

    def opened(self, address: str) -> Standing:
        """One more from this address."""
        if self._num_full < self.total and self._by_address[address] < self.per_address:
            self._num_full += 1
            self._by_address[address] += 1
            return Standing.FULL
        self._log(address)
        if self._num_probes < _RESERVED:
            self._num_probes += 1
            return Standing.PROBE
        return Standing.NONE

    def closed(self, address: str, standing: Standing) -> None:
        """One less."""
        if standing is Standing.PROBE:
            self._num_probes -= 1
        elif standing is Standing.FULL:
            self._num_full -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _log(self, address: str) -> None:
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = now
        log.warning(
            "too many connections: %d are open, %d of them from %s; allowed: %d in all, %d from one address; "
            "more are answered on /health and /ready alone",
            self._num_full,
            self._by_address[address],
            address,
            self.total,
            self.per_address,
        )


def connection_limits(total: int | None, per_address: int | None, num_descriptors: int) -> ConnectionLimits:
    """Limits as configured, within what the process may open."""
    room = max(8, num_descriptors - _RESERVED - _OTHER_DESCRIPTORS)
    total = min(_MOST if total is None else total, room)
    # By default one address leaves a quarter to others.
    return ConnectionLimits(total, min(total, max(1, total * 3 // 4) if per_address is None else per_address))
