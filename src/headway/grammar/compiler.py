"""Compiles grammars on a thread, one after the other, and keeps the last ones: an engine's steps never wait for it.

All methods belong to the engine's thread. A grammar that is known costs a copy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue

from headway.errors import RequestError
from headway.grammar.exactly import ExactMatcher
from headway.grammar.matcher import GrammarVocabulary, Matcher

_KEPT = 64  # compiled grammars
Found = Matcher | ExactMatcher | RequestError


class GrammarCompiler:
    """Every `start` is answered once in `done`, in any order, unless the compiler is closed before."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._told: Callable[[], None] = lambda: None
        self._kept: OrderedDict[str, Found] = OrderedDict()
        self._waiting: dict[str, list[int]] = {}  # grammar that is being compiled -> who asked for it
        self._ready: list[tuple[int, Found]] = []
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._compiled: deque[tuple[str, Found]] = deque()  # from the thread
        self._thread: threading.Thread | None = None

    def wake_by(self, told: Callable[[], None]) -> None:
        """`told` is called, on another thread, when `done` has something new."""
        self._told = told

    def start(self, id: int, grammar: str) -> None:
        """Compile a grammar for this request."""
        found = self._kept.get(grammar)
        if found is not None:
            self._kept.move_to_end(grammar)
            self._ready.append((id, _fresh(found)))
            return
        others = self._waiting.setdefault(grammar, [])
        others.append(id)
        if len(others) == 1:
            self._queue.put(grammar)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-grammar", daemon=True)
            self._thread.start()

    def compile(self, grammar: str) -> None:
        """Compile a grammar now, in the caller's thread, for a `start` that follows; RequestError if it cannot be."""
        if grammar not in self._kept:
            self._keep(grammar, self._vocabulary.matcher(grammar))

    def done(self) -> list[tuple[int, Found]]:
        """What has been compiled since the last call, by request, each with a matcher of its own."""
        ready, self._ready = self._ready, []
        while self._compiled:
            grammar, found = self._compiled.popleft()
            ready += [(id, _fresh(found)) for id in self._waiting.pop(grammar)]
            self._keep(grammar, found)
        return ready

    def _keep(self, grammar: str, found: Found) -> None:
        self._kept[grammar] = found
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def close(self) -> None:
        """End the thread after the grammar that it is at; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        while (grammar := self._queue.get()) is not None:
            found: Found
            try:
                found = self._vocabulary.matcher(grammar)
            except RequestError as error:
                found = error
            except Exception as error:  # a fault of ours or of the library's, with this grammar alone
                found = RequestError(f"this grammar cannot be used: {error!r}", param="grammar")
            self._compiled.append((grammar, found))
            self._told()


def _fresh(found: Found) -> Found:
    return found if isinstance(found, RequestError) else found.copy()
