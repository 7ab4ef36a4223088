"""Answers behind what a model thinks first, as the text of a grammar: free until it is closed, for so many tokens.

Like `source` this file writes text and knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.grammar.calls import ANY, regex_of, spelled, with_inner
from headway.grammar.source import lark
from headway.text.thoughts import CLOSING, OPENING

_FREE = f"start: TEXT\nTEXT: {ANY}"


def behind_thoughts(answer: str, tokens: Mapping[str, int], *, is_open: bool, most: int | None = None) -> str:
    """The grammar `answer`, any text if it is empty, behind reasoning of at most `most` tokens.

    The marks around it are one token each where `tokens` has them, and `most` needs that. Unless it is open
    already, the answer may do without.
    """
    closing = spelled(CLOSING, tokens)
    thought = "thought blank" if is_open else f"({spelled(OPENING, tokens)} thought blank)?"
    lines = [f"start: {thought} @answer", r"blank: /[ \t\r\n]{0,4}/"]
    if CLOSING not in tokens:
        assert most is None, "tokens of text without a mark cannot be counted"
        lines += [f"thought[lazy]: THOUGHT {closing}", f"THOUGHT: {ANY}"]
    elif most == 0:
        lines.append(f"thought: {closing}")
    else:
        bound = "" if most is None else f"[max_tokens={most}]"
        lines += [f"thought: inside {closing} | {closing}", f"inside{bound}: THOUGHT"]
        lines.append(f"THOUGHT: {ANY} & ~/(.|\\n)*{regex_of(CLOSING)}(.|\\n)*/")
    return with_inner("\n".join(lines), "answer", answer or lark(_FREE))
