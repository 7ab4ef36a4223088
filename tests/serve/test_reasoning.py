"""Reasoning over HTTP, from a real engine: apart from the answer, bounded, with forms and calls behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headway.build import build_engine
from headway.config import EngineConfig
from headway.grammar.check import GrammarChecker
from headway.text.tokenizer import Tokenizer
from raw_http import call
from serve_harness import TEMPLATE, Harness, byte_tokenizer, serving
from tiny_dir import tiny_options, write_tiny_model

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if thinks is not defined %}<think>\n{% elif not thinks %}<think></think>{% endif %}{% endif %}"
)
HELD = {"structured_outputs": {"choice": ["hello"]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("model")
    spec = write_tiny_model(folder, max_len=2048, template=THINKS, marks=["<think>", "</think>"])
    tokenizer = Tokenizer.open(folder / "tokenizer.json")
    engine: Any = build_engine(EngineConfig.of(**tiny_options(folder)))
    grammars = GrammarChecker(folder / "tokenizer.json", spec.vocab_size, [263])
    with serving(engine, name="tiny", template=THINKS, tokenizer=tokenizer, grammars=grammars) as made:
        yield made
        made.wait_idle()


def ask(server: Harness, **fields: object) -> dict[str, Any]:
    status, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 60, **fields})
    assert status == 200, told
    return dict(told)


def streamed(server: Harness, **fields: object) -> list[dict[str, Any]]:
    _, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 60, "stream": True, **fields})
    lines = [line.removeprefix(b"data: ") for line in told.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


@pytest.mark.parametrize("budget", [0, 1, 7, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_reasoning_is_bounded_and_the_answer_behind_it_has_its_form(server: Harness, budget: int, seed: int) -> None:
    asked = {"thinking_token_budget": budget, "seed": seed, **HELD}
    told = ask(server, **asked)
    message = told["choices"][0]["message"]
    assert message["content"] == "hello"
    assert told["choices"][0]["finish_reason"] == "stop"
    assert bool(message.get("reasoning_content")) <= bool(budget)
    assert told["usage"]["completion_tokens"] <= budget + len("hello") + 6  # the mark, blanks, the end
    parts = streamed(server, **asked)
    assert "".join(part.get("reasoning_content", "") for part in parts) == message.get("reasoning_content", "")
    assert "".join(part.get("content", "") for part in parts) == "hello"


def test_an_answer_that_is_cut_off_within_reasoning_has_no_content(server: Harness) -> None:
    message = ask(server, max_tokens=8, temperature=0)["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]


def test_without_a_bound_other_answers_are_as_they_were(server: Harness) -> None:
    asked = {"temperature": 0, "max_tokens": 30, "chat_template_kwargs": {"thinks": False}}
    assert "reasoning_content" not in ask(server, **asked)["choices"][0]["message"]
    assert ask(server, **asked)["choices"] == ask(server, thinking_token_budget=5, **asked)["choices"]


def test_calls_come_behind_reasoning(server: Harness) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"tools": tools, "parallel_tool_calls": False, "thinking_token_budget": 5, "max_tokens": 200}
    told = ask(server, tool_choice="required", **fields, messages=[{"role": "user", "content": ""}])["choices"][0]
    assert told["finish_reason"] == "tool_calls"
    (one,) = told["message"]["tool_calls"]
    assert (one["function"]["name"], json.loads(one["function"]["arguments"])) == ("f", {})


TOLD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}</>{% endfor %}{{ mood }}"
SAID = [*USER, {"role": "assistant", "content": "Well, "}]


def prompt_of(template: str, messages: object = SAID, **fields: object) -> str:
    with serving(template=template) as server:
        status, told, _ = call(server.url, "POST", "/tokenize", {"messages": messages, **fields})
        assert status == 200, told
        asked = {"messages": messages, "max_tokens": 1, **fields}
        status, _, _ = call(server.url, "POST", CHAT, asked)
        assert status == 200
        assert told["tokens"] == list(server.engine.submits[-1].tokens)
        return byte_tokenizer().decode(told["tokens"], skip_special=False)


def test_the_template_gets_its_variables_and_earlier_reasoning() -> None:
    assert prompt_of(TOLD, chat_template_kwargs={"mood": "glad"}).endswith("<assistant>Well, </>glad")
    earlier = [*USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}]
    assert prompt_of(TOLD, earlier).endswith("<assistant>ab</>")


def test_an_answer_goes_on_with_the_last_message() -> None:
    assert prompt_of(TOLD, continue_final_message=True) == "<user>hello</><assistant>Well, "
    assert prompt_of(TEMPLATE, continue_final_message=True, add_generation_prompt=False).endswith("Well, ")
    with_prompt = "{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    assert prompt_of(with_prompt, USER) == "hello!"
    assert prompt_of(with_prompt, USER, add_generation_prompt=False) == "hello"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("thinking_token_budget", {"thinking_token_budget": -1}),
        ("thinking_token_budget", {"thinking_token_budget": "3"}),
        ("chat_template_kwargs", {"chat_template_kwargs": "mood"}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs.bos_token", {"chat_template_kwargs": {"bos_token": ""}}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": "no"}),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Harness, param: str, fields: dict[str, object]) -> None:
    status, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 5, **fields})
    assert (status, told["error"]["param"]) == (400, param), told


def test_a_template_that_leaves_out_the_last_message_cannot_go_on_with_it() -> None:
    with serving(template="{{ messages[0].content }}") as server:
        asked = {"messages": SAID, "max_tokens": 5, "continue_final_message": True}
        status, told, _ = call(server.url, "POST", CHAT, asked)
        assert (status, told["error"]["param"]) == (400, "continue_final_message")
