"""The fetching end of `fetch`: a thread for each peer that blocks are fetched from, none while nothing is fetched.

Every byte is verified before it is an arrival. Whatever goes wrong ends the load with what came before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from headway.cluster.dialing import dial
from headway.cluster.fetch import Fetch, pack_fetch
from headway.cluster.fetch_config import THIS_MACHINE, FetchConfig
from headway.cluster.links import BlockLink, LinkBroken
from headway.engine.arrivals import ArrivedBlock
from headway.engine.mover import LOAD_LEASE_S
from headway.engine.tier.record import is_whole

log = logging.getLogger(__name__)

_QUIET_S = 4.0  # a peer that sends nothing for so long is given up
_IDLE_S = 30.0  # a peer that nothing is fetched from for so long is hung up on
_KEPT_BYTES = 32 * 1024 * 1024  # of memory for blocks that is used again: the system takes longer to clear new pages

_Job = tuple[int, Sequence[bytes]]


class FetchPeers:
    """A `BlockSource` over other engines. Each load ends with one arrival without data."""

    def __init__(self, identity: bytes, block_bytes: int, config: FetchConfig = THIS_MACHINE) -> None:
        self._identity = identity
        self._block_bytes = block_bytes
        self._config = config
        self._arrivals: deque[ArrivedBlock] = deque()
        self._free: deque[memoryview] = deque(maxlen=_KEPT_BYTES // max(1, block_bytes))  # for blocks to come
        self._lent: list[memoryview] = []  # with the caller of `take`
        self._cancelled: set[int] = set()
        self._jobs: dict[str, SimpleQueue[_Job | None]] = {}
        self._lock = threading.Lock()
        self.num_corrupt = 0
        self.wake: Callable[[], None] = lambda: None

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        with self._lock:
            jobs = self._jobs.get(at)
            if jobs is None:
                jobs = self._jobs[at] = SimpleQueue()
                threading.Thread(target=self._run, args=(at, jobs), name="headway-fetching", daemon=True).start()
            jobs.put((ticket, keys))

    def cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)

    def take(self, most: int) -> list[ArrivedBlock]:
        self._free += self._lent
        taken = [self._arrivals.popleft() for _ in range(min(most, len(self._arrivals)))]
        self._lent = [each.data for each in taken if isinstance(each.data, memoryview)]
        return taken

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def close(self) -> None:
        with self._lock:
            for jobs in self._jobs.values():
                jobs.put(None)

    def _run(self, at: str, jobs: SimpleQueue[_Job | None]) -> None:
        link: BlockLink | None = None
        try:
            while True:
                try:
                    job = jobs.get(timeout=_IDLE_S)
                except Empty:
                    with self._lock:
                        if not jobs.empty():
                            continue
                        del self._jobs[at]
                        if not self._jobs:
                            self._free.clear()
                        return
                if job is None:
                    return
                if job[0] in self._cancelled:
                    self._end(*job)
                    continue
                link = self._try(link, at, *job)
                while link is None and not jobs.empty():  # what has waited behind a failure is not to wait for another
                    job = jobs.get()
                    if job is None:
                        return
                    self._end(*job)
        finally:
            if link is not None:
                link.close()

    def _try(self, link: BlockLink | None, at: str, ticket: int, keys: Sequence[bytes]) -> BlockLink | None:
        """Fetch; the link, or None if that has failed."""
        try:
            link = link or dial(at, self._config, self._block_bytes)
            link.limit(LOAD_LEASE_S, _QUIET_S)
            self._fetch(link, ticket, keys)
            return link
        except LinkBroken as broken:
            log.warning("KV could not be fetched from %s, it is computed here: %s", at, broken)
        except Exception:
            log.exception("fetching KV failed")
        finally:
            self._end(ticket, keys)
        if link is not None:
            link.close()
        return None

    def _end(self, ticket: int, keys: Sequence[bytes]) -> None:
        """Nothing more comes for this load."""
        self._cancelled.discard(ticket)
        self._arrivals.append(ArrivedBlock(ticket, len(keys), None))
        self.wake()

    def _memory(self) -> memoryview:
        """For a block, as it was left."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(self._block_bytes))

    def _fetch(self, link: BlockLink, ticket: int, keys: Sequence[bytes]) -> None:
        place = {key: number for number, key in enumerate(keys)}
        link.ask(pack_fetch(Fetch(self._identity, list(keys), LOAD_LEASE_S)))
        for _ in range(len(keys) + 1):
            data = self._memory()
            header = link.receive(data)
            if header is None:
                self._free.append(data)
                return
            if not is_whole(header, data) or header.key not in place:
                self._free.append(data)
                self.num_corrupt += 1
                continue
            self._arrivals.append(ArrivedBlock(ticket, place[header.key], data))
            self.wake()
        raise LinkBroken("the peer sent more blocks than were asked for")
