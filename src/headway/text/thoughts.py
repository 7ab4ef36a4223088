"""What a model thinks before it answers: told from the answer by the marks around it, as the text comes.

    <think>⏎The user wants …⏎</think>⏎⏎Paris.          the first mark is in the prompt already with some templates
           └─── reasoning ──┘          └ answer ┘       blanks at the edges belong to neither

A pure function of the whole text, however it was split.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

OPENING, CLOSING = "<think>", "</think>"


class Thinking(Enum):
    """What a prompt lets an answer begin with."""

    NEVER = "never"
    MAY = "may"  # the answer opens it by itself, if it does
    OPEN = "open"  # the prompt has opened it

    @staticmethod
    def of(template: str, prompt: str) -> Thinking:
        """By what the model's template knows and what it made of the messages."""
        if not has_marks(template):
            return Thinking.NEVER
        end = prompt.rstrip()
        if end.endswith(OPENING):
            return Thinking.OPEN
        return Thinking.NEVER if end.endswith(CLOSING) else Thinking.MAY

    @staticmethod
    def within(message: str) -> Thinking:
        """Of an answer that goes on with this beginning of it."""
        return Thinking.OPEN if message.rfind(OPENING) > message.rfind(CLOSING) else Thinking.NEVER


def has_marks(template: str) -> bool:
    return OPENING in template or CLOSING in template


class ThoughtReader:
    """Holds back blanks and what may still turn out to be a mark."""

    def __init__(self, thinking: Thinking) -> None:
        states = {Thinking.NEVER: self._read_answer, Thinking.MAY: self._read_opening, Thinking.OPEN: self._read_blanks}
        self._state: Callable[[list[str], list[str]], bool] = states[thinking]
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and text of the answer that are certain now."""
        self._held += text
        thoughts: list[str] = []
        texts: list[str] = []
        while self._state(thoughts, texts):
            pass
        return "".join(thoughts), "".join(texts)

    def finish(self) -> tuple[str, str]:
        """As `push`, at the end of the text."""
        held, self._held = self._held, ""
        if self._state == self._read_opening:
            return "", held
        return (held.rstrip(), "") if self._state == self._read_thoughts else ("", "")

    def _read_opening(self, thoughts: list[str], texts: list[str]) -> bool:
        """Each of these methods takes what it can of the held text; False: it needs more."""
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._held = begun[len(OPENING) :]
            self._state = self._read_blanks
            return True
        if not OPENING.startswith(begun):
            self._state = self._read_answer
            return True
        return False

    def _read_blanks(self, thoughts: list[str], texts: list[str]) -> bool:
        return self._skip_blanks(self._read_thoughts)

    def _read_thoughts(self, thoughts: list[str], texts: list[str]) -> bool:
        before, mark, behind = self._held.partition(CLOSING)
        if mark:
            thoughts.append(before.rstrip())
            self._held = behind
            self._state = self._read_behind
            return True
        begun = next((n for n in range(len(CLOSING) - 1, 0, -1) if before.endswith(CLOSING[:n])), 0)
        certain = len(before[: len(before) - begun].rstrip())
        thoughts.append(before[:certain])
        self._held = before[certain:]
        return False

    def _read_behind(self, thoughts: list[str], texts: list[str]) -> bool:
        return self._skip_blanks(self._read_answer)

    def _skip_blanks(self, then: Callable[[list[str], list[str]], bool]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = then
        return bool(self._held)

    def _read_answer(self, thoughts: list[str], texts: list[str]) -> bool:
        texts.append(self._held)
        self._held = ""
        return False
