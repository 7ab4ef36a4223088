"""Tool calls and their results in a history: the template renders them, or they are refused; none is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import RequestError
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


@pytest.mark.parametrize(
    ("source", "param"),
    [
        (PLAIN, "messages[1].tool_calls[0]"),
        (NAME_ONLY, "messages[1].tool_calls[0].function.arguments"),
        (NO_TOOL_ROLE, "messages[1].tool_calls[0]"),
    ],
)
def test_calls_that_the_template_leaves_out_are_refused(source: str, param: str) -> None:
    error = refusal(source, history())
    assert (error.param, error.code) == (param, "unsupported_tool_message")
    assert param in str(error)
    assert "does not render" in str(error)


def test_results_that_the_template_leaves_out_are_refused() -> None:
    messages = [message for message in history() if message["role"] != "assistant"]
    assert render(PLAIN, messages) == "<user>Rain?<tool>sunny"
    assert refusal(NO_TOOL_ROLE, messages).param == "messages[1]"
    assert "no tools" in str(refusal(STRICT_ROLE, messages))


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
