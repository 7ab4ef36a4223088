"""How much of bodies is read at a time and how fast, over all connections. It counts bytes and knows no HTTP.

What comes first of each body, 64 KiB, has room of its own, so that short requests are read while others hold all room
for large ones; and no client holds all of that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from headway.errors import Overloaded
from headway.serve.turns import LONG_BYTES

_MAX_READING_BYTES = 64 * 1024 * 1024
_READ_BYTES_PER_S = 32 * 1024 * 1024
_BURST_S = 0.5


class BodyIntake:
    """At most `max_bytes` of the beginnings of bodies, as many of the rest, three quarters of those of one client.

    The beginnings cost no time. What is refused once all of it was read costs the more the faster it comes.
    """

    def __init__(self, max_bytes: int = _MAX_READING_BYTES, bytes_per_s: float = _READ_BYTES_PER_S) -> None:
        self._max_bytes = max_bytes
        self._bytes_per_s = bytes_per_s
        self._num_first = 0
        self._num_rest = 0
        self._by_client: Counter[str] = Counter()  # of the rest
        self._paid_until = 0.0  # the time at which the rest so far would have come at that speed

    def reading(self, client: str) -> BodyRoom:
        """One more body."""
        return BodyRoom(self, client)

    def take(self, client: str, num_first: int, num_rest: int) -> float:
        """Room for so many bytes more; how many seconds they have to wait."""
        is_full = self._num_first + num_first > self._max_bytes or self._num_rest + num_rest > self._max_bytes
        if is_full or (num_rest and self._by_client[client] + num_rest > self._max_bytes * 3 // 4):
            raise Overloaded("too many large bodies are being read; retry later", retry_after_s=1.0)
        self._num_first += num_first
        if not num_rest:
            return 0.0
        self._num_rest += num_rest
        self._by_client[client] += num_rest
        now = asyncio.get_running_loop().time()
        self._paid_until = max(now, self._paid_until) + num_rest / self._bytes_per_s
        return max(0.0, self._paid_until - now - _BURST_S)

    def give_back(self, client: str, num_first: int, num_rest: int) -> None:
        self._num_first -= num_first
        self._num_rest -= num_rest
        self._by_client[client] -= num_rest
        if not self._by_client[client]:
            del self._by_client[client]


class BodyRoom:
    """The room of one body, which has it back when the context is left."""

    def __init__(self, intake: BodyIntake, client: str) -> None:
        self._intake, self._client = intake, client
        self._num_first = self._num_rest = 0

    async def take(self, num_bytes: int) -> float:
        """So many bytes more have come; the seconds that this was held up. `Overloaded`: there is no room."""
        num_first = min(num_bytes, LONG_BYTES - self._num_first)
        wait_s = self._intake.take(self._client, num_first, num_bytes - num_first)
        self._num_first += num_first
        self._num_rest += num_bytes - num_first
        if wait_s:
            await asyncio.sleep(wait_s)
        return wait_s

    def __enter__(self) -> BodyRoom:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._intake.give_back(self._client, self._num_first, self._num_rest)
