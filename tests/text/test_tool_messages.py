"""Tools, calls and results in a conversation: rendered by the template or as plain messages; none is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.errors import RequestError
from headway.text.call_format import BARE_JSON, TAGGED, CallFormat
from headway.text.chat import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
NO_TOOL_ROLE = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x{% endfor %}"
)
# Reads the name, and fails on any that it does not know.
PICKY = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ {'weather': 'in '}[c.function.name] + c.function.arguments.city }}{% endfor %}{% endfor %}"
)
NAME_ONLY = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)


def call(arguments: object = '{"city": "Paris"}', name: object = "weather") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def history(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": list(calls) or [call()]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]


def render(source: str, messages: list[dict[str, Any]]) -> str:
    with ChatTemplate(source) as template:
        return template.render(messages)


def refusal(source: str, messages: list[dict[str, Any]]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, messages)
    return caught.value


def test_calls_are_rendered_with_their_arguments_as_the_object_they_are() -> None:
    expected = '<user>Rain?<assistant>[weather {"city": "Paris"}]<tool>sunny'
    assert render(WITH_CALLS, history()) == expected
    assert render(WITH_CALLS, history(call({"city": "Paris"}))) == expected
    assert render(PICKY, history()[:2]) == "in Paris"


IN_PLAIN = (
    '<user>Rain?<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    "<user><tool_response>\nsunny\n</tool_response>"
)


@pytest.mark.parametrize("source", [PLAIN, NO_TOOL_ROLE])
def test_calls_that_the_template_leaves_out_are_written_into_plain_messages(source: str) -> None:
    assert render(source, history()) == IN_PLAIN


def test_calls_whose_arguments_the_template_leaves_out_are_too() -> None:
    assert '"arguments": {"city": "Paris"}' in render(NAME_ONLY, history())


def test_results_that_the_template_leaves_out_or_refuses_are_too() -> None:
    messages = [message for message in history() if message["role"] != "assistant"]
    assert render(PLAIN, messages) == "<user>Rain?<tool>sunny"
    assert render(NO_TOOL_ROLE, messages) == "<user>Rain?<user><tool_response>\nsunny\n</tool_response>"
    assert render(STRICT_ROLE, messages) == "xx"


def test_results_in_a_row_are_one_message_and_text_beside_calls_stays() -> None:
    said = {**history(call(), call('{"city": "Rome"}'))[1], "content": "Let me see."}
    results = [{"role": "tool", "content": text, "tool_call_id": "1"} for text in ("sunny", "wet")]
    assert render(PLAIN, [{"role": "user", "content": "Rain?"}, said, *results]) == (
        '<user>Rain?<assistant>Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<user><tool_response>\nsunny\n</tool_response>\n<tool_response>\nwet\n</tool_response>"
    )


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
QWEN = (
    '{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{"name": N, "arguments": A} in '
    "<tool_call>{% endif %}" + WITH_CALLS
)
LLAMA = (
    """{% if tools %}{{ 'Answer {"name": N, "parameters": P}' }}{% for t in tools %}{{ t.function.name }}{% endfor %}"""
    "{% endif %}" + WITH_CALLS
)
ALIEN = "{% for t in tools or [] %}[TOOL]{{ t.function.name }}{% endfor %}" + WITH_CALLS


@pytest.mark.parametrize(("source", "format"), [(QWEN, TAGGED), (LLAMA, BARE_JSON)])
def test_a_template_that_knows_tools_renders_them_and_says_how_calls_look(source: str, format: CallFormat) -> None:
    with ChatTemplate(source) as template:
        told = template.rendered(history(), [TOOL])
    assert told.calls is format
    assert "weather" in told.text.partition("<user>")[0]
    assert "<user>Rain?<assistant>[weather" in told.text


@pytest.mark.parametrize("source", [PLAIN, ALIEN, QWEN.replace("t | tojson", "1")])
def test_tools_that_no_template_renders_as_known_here_open_the_conversation(source: str) -> None:
    with ChatTemplate(source) as template:
        told = template.rendered(history(), [TOOL])
        inside = template.rendered([{"role": "system", "content": "Be kind."}, *history()], [TOOL])
    assert told.calls is TAGGED
    assert told.text.startswith("<system># Tools")
    assert json.dumps(TOOL) in told.text
    assert told.text.endswith(IN_PLAIN)
    assert inside.text.startswith("<system>Be kind.\n\n# Tools")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (call("{city: Paris}"), "messages[1].tool_calls[0].function.arguments"),
        (call("[1]"), "messages[1].tool_calls[0].function.arguments"),
        (call(5), "messages[1].tool_calls[0].function.arguments"),
        (call(name=None), "messages[1].tool_calls[0].function.name"),
        ({"id": "1", "type": "function"}, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_call_that_is_none_is_refused_where_it_is(wrong: dict[str, Any], param: str) -> None:
    assert refusal(WITH_CALLS, history(wrong)).param == param


def test_no_calls_are_no_tool_calls() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    assert render(PLAIN, messages) == "<user>a<assistant>b"
    assert render(PLAIN, [{"role": "user", "content": "a", "tool_calls": None}]) == "<user>a"
