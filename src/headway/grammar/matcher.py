"""Grammars over a model's vocabulary: which tokens may come next, and which must.

`GrammarVocabulary` compiles the text of a grammar; `Matcher` follows one answer through it. llguidance does the work
and is imported when the first grammar is compiled. Nothing here knows requests or steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import Any

from headway.errors import RequestError
from headway.grammar.exactly import ExactMatcher, is_exact
from headway.grammar.limits import MOST_SLOW, PARSER, SLOW_MASK_S

# Attributes of Lark rules with which llguidance cannot undo a token; elsewhere in a grammar they cost a little time.
_FORGETFUL = re.compile(r"\b(max_tokens|stop)\s*=")


def require_library() -> None:
    """RequestError where llguidance is not installed."""
    if find_spec("llguidance") is None:
        raise RequestError("grammars need the package llguidance, which is not installed here", param="grammar")


class MaskPace:
    """How long the masks of a grammar take, over all answers by it: many copies of a slow one are slow together."""

    def __init__(self) -> None:
        self._num_slow = 0  # in a row

    def is_exceeded(self, seconds: float) -> bool:
        """Whether this mask, and those before it, took too long: other answers of the engine wait for them."""
        self._num_slow = self._num_slow + 1 if seconds > SLOW_MASK_S else 0
        return self._num_slow >= MOST_SLOW


class Matcher:
    """Where one answer is in its grammar. `error` says why it cannot go on; after that every token is forbidden."""

    def __init__(
        self, inner: Any, executor: Any, vocab_size: int, pace: MaskPace | None = None, *, goes_back: bool = True
    ) -> None:
        """`goes_back`: llguidance can look at draft tokens and undo that."""
        self._inner = inner
        self._goes_back = goes_back
        self._executor = executor
        self._vocab_size = vocab_size
        self._pace = pace or MaskPace()
        self._is_slow = False  # it was given up for that

    def copy(self) -> Matcher:
        """The same place, for another answer."""
        inner = self._inner.deep_copy()
        return Matcher(inner, self._executor, self._vocab_size, self._pace, goes_back=self._goes_back)

    @property
    def error(self) -> str:
        slow = f"what may come next takes more than {1e3 * SLOW_MASK_S:g} ms to find out, token after token"
        return slow if self._is_slow else str(self._inner.get_error())

    def take(self, tokens: Sequence[int]) -> bool:
        """The answer goes on with these; False, and an `error`, if the grammar does not."""
        return all(self._inner.consume_token(token) for token in tokens)

    def masks(self, drafts: Sequence[int]) -> bytes:
        """A mask for the next token and for the one behind each draft token, end to end; see `Late`.

        Behind a draft token that is forbidden nothing is allowed: it is rejected anyway.
        """
        if drafts and not self._goes_back:
            return self._masks_by_copy(drafts)
        width = 4 * -(-self._vocab_size // 32)  # llguidance writes words
        bits = bytearray(width * (1 + len(drafts)))
        at = addressof(c_char.from_buffer(bits))
        if drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(self._inner, 0, list(drafts))], at, width, 1 + len(drafts)
            )
        else:
            began = thread_time()
            self._inner.unsafe_compute_mask_ptr(at, width)
            self._is_slow |= self._pace.is_exceeded(thread_time() - began)
        size = -(-self._vocab_size // 8)
        # In error llguidance would have the answer end here, as if it were complete.
        if self._is_slow or self._inner.is_error():
            return bytes(size * (1 + len(drafts)))
        view = memoryview(bits)
        return b"".join(view[place : place + size] for place in range(0, len(bits), width))

    def _masks_by_copy(self, drafts: Sequence[int]) -> bytes:
        """As `masks`, by a copy that takes the draft tokens."""
        found, ahead = [self.masks(())], self.copy()
        for at, token in enumerate(drafts):
            if not ahead.take((token,)):
                return b"".join(found) + bytes(len(found[0]) * (len(drafts) - at))
            found.append(ahead.masks(()))
        return b"".join(found)

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens that the grammar leaves no choice but to spell next, as this vocabulary usually spells them."""
        return tuple(self._inner.compute_ff_tokens()[:most]) if most > 0 else ()


class GrammarVocabulary:
    """The tokens of one model. Threads may compile at the same time."""

    def __init__(self, tokenizer: Callable[[], Path], vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer` says where its file is; it is asked when the first grammar comes."""
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokens: Any = None
        self._executor: Any = None
        self._lock = Lock()

    def matcher(self, grammar: str) -> Matcher | ExactMatcher:
        """As `compile`, also of a grammar that is exactly some tokens."""
        return ExactMatcher.of(grammar, self._vocab_size) if is_exact(grammar) else self.compile(grammar)

    def compile(self, grammar: str) -> Matcher:
        """The beginning of an answer by this grammar; RequestError if it is none, or exceeds the limits."""
        require_library()
        import llguidance

        self._open()
        limits = llguidance.LLParserLimits(**PARSER)  # type: ignore[arg-type]
        inner = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if not inner.is_error():
            inner.compute_bitmask()  # here and not in a step: copies have it, and the first is the dearest
        if inner.is_error():
            raise RequestError(f"this grammar cannot be used: {inner.get_error()[:500]}", param="grammar")
        goes_back = _FORGETFUL.search(grammar) is None
        return Matcher(inner, self._executor, self._vocab_size, goes_back=goes_back)

    def _open(self) -> None:
        with self._lock:
            if self._tokens is not None:
                return
            import llguidance

            if not self._eos_ids:
                raise RequestError("this model has no end-of-sequence token for an answer by a grammar to end with")
            self._executor = llguidance.LLExecutor(num_threads=1)
            self._tokens = llguidance.LLTokenizer(str(self._path()), n_vocab=self._vocab_size, eos_token=self._eos_ids)
