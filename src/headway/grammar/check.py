"""Whether a grammar can be used, found out before anything is computed: in a process that may be killed.

Owns that process (`check_child`), its bounds, and what was found out lately. Refuses to know HTTP and requests.
"""

from __future__ import annotations

import json
import signal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from headway.errors import EngineError, Overloaded, RequestError
from headway.grammar.limits import CHECK_S, GRAMMAR_BYTES, MEMORY_BYTES, PARSER
from headway.grammar.matcher import require_library
from headway.request_limits import LIMITS
from headway.text.child import FROM_OUTSIDE, READ_BYTES, ChildPool, LimitedChild

_START_S = 30.0  # to import llguidance and to read the vocabulary, on a busy machine
_REMEMBERED_CHARS = 8 << 20  # of grammars whose verdict is known


@dataclass(frozen=True, slots=True)
class Checked:
    """A grammar that can be compiled, and what of it is not honoured."""

    grammar: str
    warnings: tuple[str, ...] = ()


class GrammarChecker:
    """One child, started with the first grammar. Threads may share it; a verdict is remembered."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int], *, check_s: float = CHECK_S) -> None:
        self._setup = {
            "tokenizer": str(tokenizer),
            "vocab_size": vocab_size,
            "eos_ids": list(eos_ids),
            "parser": dict(PARSER),
            "memory_bytes": MEMORY_BYTES,
            "grammar_bytes": GRAMMAR_BYTES,
            "start_s": 2 * _START_S,
            "alarm_s": 2 * check_s + 1.0,
        }
        self._check_s = check_s
        self._children = ChildPool(self._started, 1)
        self._known: OrderedDict[tuple[str, str | None], Checked | str] = OrderedDict()
        self._num_chars = 0
        self._lock = Lock()

    def check(self, grammar: str, *, lenient: str | None = None, param: str = "grammar") -> Checked:
        """The grammar to use. Blocks until that is known; RequestError names `param` if there is none.

        `lenient` is used where `grammar` cannot be compiled.
        """
        if len(grammar) > LIMITS.grammar_chars:
            raise RequestError(
                f"{param} has {len(grammar)} characters as a grammar; allowed: up to {LIMITS.grammar_chars}",
                param=param,
            )
        if not self._setup["eos_ids"]:
            raise RequestError(
                f"{param} cannot be honoured: this model has no end-of-sequence token to end with", param=param
            )
        require_library()
        key = (grammar, lenient)
        found = self._recalled(key)
        if found is None:
            with self._children.borrowed() as child:
                found = self._verdict(child, grammar, lenient)
            self._remember(key, found)
        if isinstance(found, str):
            raise RequestError(f"{param} cannot be honoured: {found}", param=param, code="invalid_value")
        return found

    def known(self, grammar: str, lenient: str | None) -> Checked | None:
        """What `check` would give without asking; None: it would ask, or refuse."""
        found = self._recalled((grammar, lenient))
        return found if isinstance(found, Checked) else None

    def close(self) -> None:
        """End the child; a later check starts another."""
        self._children.close()

    def _recalled(self, key: tuple[str, str | None]) -> Checked | str | None:
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def _remember(self, key: tuple[str, str | None], found: Checked | str) -> None:
        with self._lock:
            if key not in self._known:
                self._num_chars += sum(map(len, filter(None, key)))
            self._known[key] = found
            while self._num_chars > _REMEMBERED_CHARS:
                oldest, _ = self._known.popitem(last=False)
                self._num_chars -= sum(map(len, filter(None, oldest)))

    def _started(self) -> LimitedChild:
        child = LimitedChild(Path(__file__).with_name("check_child.py"))
        try:
            if child.ask(json.dumps(self._setup).encode() + b"\n", _START_S, READ_BYTES).get("ready") is True:
                return child
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            child.kill()
            raise EngineError(f"the process that checks grammars does not start ({error!r}); see the log") from error
        child.kill()
        raise EngineError("the process that checks grammars does not start; see the log")

    def _verdict(self, child: LimitedChild, grammar: str, lenient: str | None) -> Checked | str:
        """What the child finds; if no answer comes it is killed, and its CPU time says whose fault that is."""
        line = json.dumps({"grammar": grammar, "lenient": lenient}).encode() + b"\n"
        try:
            said = child.ask(line, self._check_s, 12 * LIMITS.grammar_chars + READ_BYTES)
        except TimeoutError:
            if child.kill() < self._check_s / 5:
                raise _stalled() from None
        except (OSError, EOFError, ValueError):
            child.kill()
            if child.exit_signal in FROM_OUTSIDE:
                raise _stalled() from None
            if child.exit_signal != signal.SIGALRM:
                return "it is too complex: the process that tried it out ended by it; simplify it"
        else:
            text, error, warnings = said.get("grammar"), said.get("error"), said.get("warnings")
            if isinstance(text, str) and isinstance(warnings, list):
                return Checked(text, tuple(map(str, warnings)))
            return str(error)
        return f"it takes longer than {self._check_s:g} s to compile; simplify it"


def _stalled() -> Overloaded:
    """The child was stopped, killed or got no time: nothing is wrong with the grammar."""
    return Overloaded("the process that checks grammars did not answer; retry", retry_after_s=1.0)
