"""The thread that stores blocks and finds them again: in host memory, on disk, or both. No step waits for it.

    engine thread   store(key, data) ─▶ queue ─▶ host memory, disk
                    load(ticket, keys) ─▶ queue ─▶ read, verify ─▶ arrivals ─▶ engine thread writes them into the pool

Loads go before stores. Blocks that wait to be stored take a bounded number of bytes; beyond it they are not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headway.engine.arrivals import ArrivedBlock
from headway.engine.tier.disk import DiskTier
from headway.engine.tier.host import HostTier
from headway.engine.tier.record import Buffer

log = logging.getLogger(__name__)

_PENDING_BYTES = 64 << 20
_REFRESH_S = 1.0  # between two looks at what other processes have written, while there is something to do


class BlockKeeper:
    """Every load ends with exactly one arrival without data, after those of the blocks that were found."""

    def __init__(self, host: HostTier | None, disk: DiskTier | None, *, pending_bytes: int = _PENDING_BYTES) -> None:
        self._host = host
        self._disk = disk
        self._most_pending = pending_bytes
        self._loads: deque[tuple[int, list[bytes]]] = deque()
        self._stores: deque[tuple[bytes, Buffer]] = deque()
        self._pending: dict[bytes, int] = {}  # key -> bytes that wait to be stored
        self._num_pending = 0
        self._arrivals: deque[ArrivedBlock] = deque()
        self._cancelled: set[int] = set()
        self._work = threading.Condition()
        self._is_closing = False
        self._is_busy = False
        self._refreshed = time.monotonic()
        self.wake: Callable[[], None] = lambda: None  # the engine's thread has something to look at
        self._thread = threading.Thread(target=self._run, name="headway-tier", daemon=True)
        self._thread.start()

    # For the engine's thread.

    def has(self, key: bytes) -> bool:
        host, disk = self._host, self._disk
        return (host is not None and host.has(key)) or (disk is not None and disk.has(key))

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of these, from the first on, would be found."""
        return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))

    def wants(self, key: bytes, num_bytes: int) -> bool:
        """True if this block should be stored and there is room to queue it."""
        is_known = key in self._pending or self.has(key)
        return not is_known and self._num_pending + num_bytes <= self._most_pending

    def store(self, key: bytes, data: Buffer) -> None:
        """Queue a block; `data` is not to be changed any more."""
        with self._work:
            self._pending[key] = len(data)
            self._num_pending += len(data)
            self._stores.append((key, data))
            self._work.notify()

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        """Begin to read these blocks; they come as arrivals, in order, as far as there is no gap."""
        with self._work:
            self._loads.append((ticket, list(keys)))
            self._work.notify()

    def cancel(self, ticket: int) -> None:
        """What still comes for this ticket is not wanted."""
        self._cancelled.add(ticket)

    def take(self, most: int) -> list[ArrivedBlock]:
        """Up to so many arrivals."""
        return [self._arrivals.popleft() for _ in range(min(most, len(self._arrivals)))]

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until nothing is queued: for tests, tools and an orderly end."""
        until = time.monotonic() + timeout_s
        with self._work:
            while self._stores or self._loads or self._is_busy:
                if not self._work.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    return False
        return True

    def close(self) -> None:
        """Store what is queued, then end; idempotent."""
        with self._work:
            self._is_closing = True
            self._work.notify()
        self._thread.join(10.0)
        if self._disk is not None and not self._thread.is_alive():
            self._disk.close()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._work:
                self._is_busy = False
                self._work.notify_all()
                while not (self._loads or self._stores or self._is_closing):
                    self._work.wait()
                if not self._loads and not self._stores:
                    return
                self._is_busy = True
                load = self._loads.popleft() if self._loads else None
                store = self._stores.popleft() if load is None else None
            try:
                if load is not None:
                    self._load(*load)
                elif store is not None:
                    self._store(*store)
                self._look_around()
            except Exception:  # whatever it is, it costs a cache miss and no more
                log.exception("the KV tier failed")

    def _store(self, key: bytes, data: Buffer) -> None:
        try:
            if self._host is not None:
                self._host.put(key, data)
            if self._disk is not None:
                self._disk.put(key, data)
        finally:
            with self._work:
                self._num_pending -= self._pending.pop(key, 0)

    def _load(self, ticket: int, keys: Sequence[bytes]) -> None:
        try:
            for index, key in enumerate(keys):
                if ticket in self._cancelled or (data := self._find(key)) is None:
                    break
                self._arrivals.append(ArrivedBlock(ticket, index, data))
                self.wake()
        finally:
            self._cancelled.discard(ticket)
            self._arrivals.append(ArrivedBlock(ticket, len(keys), None))
            self.wake()

    def _find(self, key: bytes) -> bytes | None:
        data = None if self._host is None else self._host.get(key)
        if data is None and self._disk is not None:
            data = self._disk.get(key)
            if data is not None and self._host is not None:
                self._host.put(key, data)
        return data

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._disk is not None and now >= self._refreshed + _REFRESH_S:
            self._refreshed = now
            self._disk.refresh()
