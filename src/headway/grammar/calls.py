"""Answers with calls of tools as the text of a grammar: free text up to a call, then nothing but calls.

    Let me see. <tool_call>⏎{"name": "weather", "arguments": {"city": "Paris"}}⏎</tool_call>
    └── text ─┘ └ what opens a call: from here on the grammar leaves no choice but in the arguments

Literals that are one token of the vocabulary stand for that token, which text cannot have. Like `source` this file
writes text and knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.grammar.source import lark_string, with_options
from headway.text.call_format import CallFormat

MOST_CALLS = 32  # of one answer: a weak model would go on with calls for ever
ANY = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """What may be called, with a schema of its arguments; strict: a schema that cannot be honoured is refused."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which calls an answer may have or, where it is `required`, must have; at most `most` of them."""

    functions: tuple[CallableFunction, ...]
    is_required: bool = False
    most: int = MOST_CALLS


def calls(
    choice: CallChoice, format: CallFormat, tokens: Mapping[str, int], form: str = "", *, is_lenient: bool = False
) -> str:
    """Text or calls; `tokens` are the literals that one token spells.

    `form` is the grammar of answers without calls, any text if it is empty. Lenient: what of the schemas cannot be
    honoured is left out, but of strict functions.
    """
    most = choice.most if format.between is not None else 1
    more = f" ({spelled(format.between or '', tokens)} call){{0,{most - 1}}}" if most > 1 else ""
    opening = spelled(format.opening, tokens)
    lines = [f"call: {opening} body", f"body: {spelled(format.head, tokens)} function {spelled(format.end, tokens)}"]
    if choice.is_required:
        lines.append(f"start: call{more}")
    elif form:
        lines.append(f"start: @form | call{more}")
    else:
        lines += _after_text(format, opening, more, is_token=format.opening in tokens)
    names = [f"f{at}" for at in range(len(choice.functions))]
    lines.append(f"function: {' | '.join(names)}")
    for name, function in zip(names, choice.functions, strict=True):
        is_loose = is_lenient and not function.is_strict
        schema = json.dumps(with_options(function.parameters, is_lenient=is_loose))
        lines.append(f"{name}: {lark_string(function.name + format.middle)} %json {schema}")
    return with_inner("\n".join(lines), "form", form)


def spelled(literal: str, tokens: Mapping[str, int]) -> str:
    """A literal in Lark's notation, each of these tokens in it as that token."""
    names = "|".join(re.escape(name) for name in tokens)
    parts = re.split(f"({names})", literal) if names else [literal]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else lark_string(part) for part in parts if part)


def with_inner(lark: str, name: str, inner: str) -> str:
    """The text of a grammar in Lark's notation that speaks of another one by `@name`; that one is none if empty."""
    within = json.loads(inner)["grammars"] if inner else []
    named = [{**grammar, "name": name} if at == 0 else grammar for at, grammar in enumerate(within)]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *named]})


def _after_text(format: CallFormat, opening: str, more: str, *, is_token: bool) -> list[str]:
    """Calls that free text may come before; it ends where a call is opened, so no text ever has what opens one."""
    if not format.opening:
        text = f"{ANY} & ~/{regex_of(format.head)}(.|\\n)*/"
        return [f"start: TEXT | call{more}", f"TEXT: {text}"]
    if is_token:  # nor does text spell it by other tokens
        text = f"{ANY} & ~/(.|\\n)*{regex_of(format.opening)}(.|\\n)*/"
        return [f"start: TEXT | TEXT call{more} | call{more}", f"TEXT: {text}"]
    return [f"start: TEXT | opened body{more}", f"opened[lazy]: TEXT {opening}", f"TEXT: {ANY}"]


def regex_of(literal: str) -> str:
    """A literal between the slashes of a regular expression in Lark's notation."""
    return re.escape(literal).replace("\n", "n").replace("/", "\\/")
