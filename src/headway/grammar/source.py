"""What tokens of an answer may be, written as text: the one form in which a grammar travels to the engine.

    json_object() | json_schema({...}) | regex("...") | choice([...]) | lark("...")   ->  SamplingParams(grammar=...)

The text is JSON as llguidance reads it. This file writes it and knows no tokens; whether it can be compiled is found
out by `check` in a process of its own, and by `matcher` in the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headway.errors import RequestError

# Between the parts of a JSON text: bounded, as a weak model writes blanks for ever where it may.
_WHITESPACE = r"[ \t\r\n]{1,16}"


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, object], *, is_lenient: bool = False) -> str:
    """JSON that a schema allows; lenient: keywords that cannot be honoured are left out instead of refused."""
    return _text(json_schema=with_options(schema, is_lenient=is_lenient))


def with_options(schema: Mapping[str, object], *, is_lenient: bool) -> dict[str, object]:
    """A schema with what llguidance is to do by it."""
    options: dict[str, object] = {"whitespace_pattern": _WHITESPACE}
    if is_lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return {**schema, "x-guidance": options}


def regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole; anchors at its ends say nothing more."""
    return _text(lark_grammar=f"start: {lark_regex(_without_anchors(pattern))}")


def choice(options: Sequence[str]) -> str:
    """One of these texts, exactly."""
    return _text(lark_grammar="start: " + " | ".join(lark_string(option) for option in options))


def lark(grammar: str) -> str:
    """Text by a context-free grammar in Lark's notation, with the rule `start`."""
    return _text(lark_grammar=grammar)


def lark_string(text: str) -> str:
    """Lark's strings are JSON's but for DEL, which they may not have as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_anchors(pattern: str) -> str:
    pattern = pattern.removeprefix("^")
    num_escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and num_escapes % 2 == 0 else pattern


def lark_regex(pattern: str) -> str:
    """Between slashes, so that a slash and a line's end need escaping."""
    written, is_escaped = [], False
    for char in pattern:
        if char == "/" and not is_escaped:
            written.append("\\/")
        elif char == "\n":
            written.append("n" if is_escaped else "\\n")
        else:
            written.append(char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(written)}/"


def _text(**grammar: object) -> str:
    try:
        return json.dumps({"grammars": [grammar]})
    except RecursionError:
        raise RequestError("the schema nests too deeply", param="grammar") from None
