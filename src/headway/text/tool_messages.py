"""Tools, calls and their results in a conversation: checked, and found again in what a chat template made of them.

Templates leave out what they do not know, and a model that does not see a call answers as if there had been none. So a
conversation with tools is rendered a second time with a random word in place of every name, argument and result: a
word that is not in that text was left out. Owns that probe and the shape of a call; refuses to know how templates run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from headway.errors import RequestError

_Message = Mapping[str, Any]


def prepared(messages: Sequence[_Message]) -> list[_Message]:
    """The messages with every call's arguments as the object that templates expect; OpenAI's have them as JSON text."""
    return [
        {**message, "tool_calls": [_call(each, f"messages[{index}].tool_calls[{at}]") for at, each in enumerate(calls)]}
        if isinstance(calls := message.get("tool_calls"), list | tuple) and calls
        else message
        for index, message in enumerate(messages)
    ]


@dataclass(frozen=True, slots=True)
class ToolProbe:
    """A conversation of the same shape whose words can be told from any text; `words` are those to be rendered."""

    messages: list[_Message]
    tools: list[_Message]
    words: list[str]

    @staticmethod
    def of(messages: Sequence[_Message], tools: Sequence[_Message] = ()) -> ToolProbe | None:
        """None: there is nothing of tools in it."""
        words: list[str] = []
        probed = [_probed(message, words) for message in messages]
        named: list[_Message] = [{**tool, "function": {**tool["function"], "name": _word(words)}} for tool in tools]
        return ToolProbe(probed, named, words) if words else None

    def is_whole(self, text: str) -> bool:
        """Whether nothing was left out of the rendered probe."""
        return all(word in text for word in self.words)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _fault(f"{where}.function", function, "an object with name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise _fault(f"{where}.function.name", name, "a text that is not empty")
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, Mapping):
        raise _fault(f"{where}.function.arguments", arguments, "a JSON object, as a text or as it is")
    return {**call, "function": {**function, "arguments": dict(found)}}


def _fault(path: str, got: object, allowed: str) -> RequestError:
    shown = "missing" if got is None else f"{got!r:.64}"
    return RequestError(f"{path} is {shown}; allowed: {allowed}", param=path)


def _word(words: list[str]) -> str:
    words.append(token_hex(8))
    return words[-1]


def _probed(message: _Message, words: list[str]) -> _Message:
    result = dict(message)
    if message.get("role") == "tool" and isinstance(message.get("content"), str):
        result["content"] = _word(words)
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = dict.fromkeys(function["arguments"], _word(words)) if function["arguments"] else {}
            calls.append({**call, "function": {**function, "name": _word(words), "arguments": arguments}})
        result["tool_calls"] = calls
    return result
