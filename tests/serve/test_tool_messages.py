"""Histories with tool calls, over HTTP: rendered by the model's template, or written into plain messages."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from serve_harness import Harness, byte_tokenizer, serving

WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
]


def post(server: Harness, messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_a_template_that_knows_tools_renders_them() -> None:
    with serving(template=WITH_CALLS) as server:
        assert post(server, HISTORY)[0] == 200
        prompt = byte_tokenizer().decode(server.engine.submits[-1].tokens, skip_special=False)
        assert prompt == '<user>Rain?<assistant>[weather {"city": "Paris"}]<tool>sunny'


def test_with_a_template_that_knows_none_plain_messages_have_them() -> None:
    with serving() as server:
        assert post(server, HISTORY)[0] == 200
        assert byte_tokenizer().decode(server.engine.submits[-1].tokens, skip_special=False) == (
            'user: Rain?\nassistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            "user: <tool_response>\nsunny\n</tool_response>\n"
        )
        assert post(server, [HISTORY[0], {**HISTORY[1], "content": "b", "tool_calls": []}, HISTORY[2]])[0] == 200


def test_the_older_function_call_is_refused() -> None:
    with serving(template=WITH_CALLS) as server:
        old = {"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments": "{}"}}
        status, answer = post(server, [HISTORY[0], old])
        assert (status, answer["error"]["param"]) == (400, "messages[1].function_call")
        assert "tool_calls" in answer["error"]["message"]
        assert post(server, [HISTORY[0], {**old, "content": "b", "function_call": None}])[0] == 200
