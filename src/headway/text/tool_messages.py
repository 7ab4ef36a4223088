"""Tool calls and their results in a history: checked, and found again in what a chat template made of them.

Templates leave out what they do not know, and a model that does not see a call answers as if there had been none. So a
history with tool messages is rendered a second time with a random word in place of every name, argument and result: a
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
    """A history of the same shape whose words can be told from any text; `words` has path -> what must be rendered."""

    messages: list[_Message]
    words: dict[str, str]

    @staticmethod
    def of(messages: Sequence[_Message]) -> ToolProbe | None:
        """None: there is nothing of tools in it."""
        words: dict[str, str] = {}
        probe = [_probed(message, f"messages[{index}]", words) for index, message in enumerate(messages)]
        return ToolProbe(probe, words) if words else None

    def require(self, text: str) -> None:
        """RequestError if something was left out of the rendered probe."""
        missing = [path for path, word in self.words.items() if word not in text]
        if not missing:
            return
        call = missing[0].partition(".function")[0]
        is_whole = call != missing[0] and all(path in missing for path in self.words if path.startswith(f"{call}."))
        path = call if is_whole else missing[0]
        raise RequestError(
            f"{path}: this model's chat template does not render it, so the answer would be as if it were not there; "
            "write it into the content of a message, or serve a model whose template knows tools",
            param=path,
            code="unsupported_tool_message",
        )


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


def _probed(message: _Message, where: str, words: dict[str, str]) -> _Message:
    result = dict(message)
    if message.get("role") == "tool" and isinstance(message.get("content"), str):
        result["content"] = words[where] = token_hex(8)
    if message.get("tool_calls"):
        calls = []
        for at, call in enumerate(message["tool_calls"]):
            path, function = f"{where}.tool_calls[{at}].function", call["function"]
            words[f"{path}.name"] = name = token_hex(8)
            arguments = dict.fromkeys(function["arguments"], "")
            if arguments:
                words[f"{path}.arguments"] = word = token_hex(8)
                arguments = dict.fromkeys(arguments, word)
            calls.append({**call, "function": {**function, "name": name, "arguments": arguments}})
        result["tool_calls"] = calls
    return result
