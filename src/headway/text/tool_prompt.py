"""Tools, calls and results written into messages that any chat template renders.

For templates that know no tools: the functions go into the system message, calls into the text of the assistant, as
it is to write them itself, and results into a message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.text.call_format import TAGGED

_Message = Mapping[str, Any]


def in_plain_messages(messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]]) -> list[_Message]:
    """The same conversation without tool calls and messages of the role `tool`, opened by what `tools` there are."""
    result: list[_Message] = []
    for message in messages:
        if message["role"] == "tool":
            said = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            last = result[-1] if result else None
            if last is not None and last.get("holds_results"):
                result[-1] = {**last, "content": f"{last['content']}\n{said}"}
            else:
                result.append({"role": "user", "content": said, "holds_results": True})
        elif message.get("tool_calls"):
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            result.append({**kept, "content": "\n".join(filter(None, [message.get("content"), *calls]))})
        else:
            result.append(message)
    result = [{name: value for name, value in message.items() if name != "holds_results"} for message in result]
    return _opened(result, tools) if tools else result


def _call_text(function: Mapping[str, Any]) -> str:
    return TAGGED.written(function["name"], json.dumps(function["arguments"], ensure_ascii=False))


def _opened(messages: list[_Message], tools: Sequence[Mapping[str, Any]]) -> list[_Message]:
    told = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    shape = TAGGED.written("NAME", "{…}")
    said = (
        "# Tools\n\nYou can call these functions to help with the user's request. Each is described by a line of JSON "
        f"between <tools> and </tools>:\n<tools>\n{told}\n</tools>\n\n"
        "To call one, write its name and its arguments as JSON between <tool_call> and </tool_call>, and nothing "
        f"after it:\n{shape}\nWhat it gave comes back between <tool_response> and </tool_response>."
    )
    first = messages[0] if messages else None
    if first is not None and first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{said}"}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]
