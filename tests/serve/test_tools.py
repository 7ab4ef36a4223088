"""Functions offered over HTTP, by OpenAI's client, to a real engine: calls have the form, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from headway.build import build_engine
from headway.config import EngineConfig
from headway.grammar.check import GrammarChecker
from headway.text.tokenizer import Tokenizer
from raw_http import call
from serve_harness import Harness, serving
from tiny_dir import tiny_options, write_tiny_model

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "hello"}]


class Greet(BaseModel):
    """Say it."""

    model_config = ConfigDict(extra="forbid")
    word: Literal["hello", "held"]
    is_loud: bool


class Leave(BaseModel):
    model_config = ConfigDict(extra="forbid")


GREET, LEAVE = openai.pydantic_function_tool(Greet), openai.pydantic_function_tool(Leave)
TOOLS: Any = [GREET, LEAVE]
KINDS: dict[str, type[BaseModel]] = {"Greet": Greet, "Leave": Leave}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("model")
    spec = write_tiny_model(folder, max_len=4096)
    tokenizer = Tokenizer.open(folder / "tokenizer.json")
    engine: Any = build_engine(EngineConfig.of(**tiny_options(folder)))
    grammars = GrammarChecker(folder / "tokenizer.json", spec.vocab_size, [263])
    with serving(engine, name="tiny", tokenizer=tokenizer, grammars=grammars) as made:
        yield made
        made.wait_idle()


@pytest.fixture(scope="module")
def client(server: Harness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def ask(server: Harness, **fields: object) -> tuple[int, dict[str, Any]]:
    status, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 600, **fields})
    return status, told


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or []]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Greet"}}])
def test_forced_calls_are_of_the_functions_and_their_schemas(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 2800}
    for seed in range(4):
        answer = client.chat.completions.create(**asked, seed=seed, n=2)
        for one in answer.choices:
            assert one.finish_reason == "tool_calls"
            assert one.message.content is None
            calls = called(one.message)
            assert calls
            for name, arguments in calls:
                KINDS[name].model_validate(arguments)
            if isinstance(choice, dict):
                assert [name for name, _ in calls] == ["Greet"]
    ids = [each.id for one in answer.choices for each in one.message.tool_calls or []]
    assert len(set(ids)) == len(ids)


def test_one_call_where_parallel_ones_are_not_wanted(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 2800}
    several = [client.chat.completions.create(**asked, seed=seed).choices[0].message for seed in range(6)]
    assert max(len(called(message)) for message in several) > 1
    for seed in range(6):
        one = client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False)
        assert len(called(one.choices[0].message)) == 1


def test_a_stream_is_the_same_answer_in_parts(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "seed": 3, "max_tokens": 2800}
    for choice in ("required", {"type": "function", "function": {"name": "Greet"}}):
        whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
            kinds = {event.type for event in stream}
            last = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert called(last.message) == called(whole.message)
        assert [each.id for each in last.message.tool_calls or []] == [
            each.id for each in whole.message.tool_calls or []
        ]
        assert (last.finish_reason, whole.finish_reason) == ("tool_calls", "tool_calls")
        parsed = [each.function.parsed_arguments for each in last.message.tool_calls or []]
        assert all(isinstance(each, BaseModel) for each in parsed)


def test_deltas_have_id_and_name_first_and_then_pieces_of_arguments(server: Harness) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "stream": True, "parallel_tool_calls": False}
    _, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 600, **asked})
    lines = [line.removeprefix(b"data: ") for line in told.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line)["choices"][0] for line in lines]
    deltas = [each["delta"]["tool_calls"] for each in chunks if "tool_calls" in each["delta"]]
    assert all(len(each) == 1 for each in deltas)
    first, rest = deltas[0][0], [each[0] for each in deltas[1:]]
    assert first["type"] == "function"
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"]["arguments"] == ""
    assert all(set(each) == {"index", "function"} and set(each["function"]) == {"arguments"} for each in rest)
    json.loads("".join(each["function"]["arguments"] for each in rest))
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert not any(each["delta"].get("content") for each in chunks)


def test_answers_may_be_text_and_others_stay_as_they_are(server: Harness) -> None:
    plain = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    _, alone = ask(server, **plain)
    auto = {"tools": TOOLS, "seed": 5, "max_tokens": 60}
    _, auto_alone = ask(server, **auto)
    with ThreadPoolExecutor(6) as pool:
        forced = [pool.submit(ask, server, tools=TOOLS, tool_choice="required", seed=at) for at in range(3)]
        autos = [pool.submit(ask, server, **auto) for _ in range(2)]
        others = [pool.submit(ask, server, **plain) for _ in range(3)]
        assert [each.result()[1]["choices"] for each in others] == [alone["choices"]] * 3
        assert [each.result()[1]["choices"] for each in autos] == [auto_alone["choices"]] * 2
        assert all(each.result()[1]["choices"][0]["message"]["tool_calls"] for each in forced)
    message = auto_alone["choices"][0]["message"]
    assert message["content"]
    assert "tool_calls" not in message


def test_with_none_no_function_is_offered(server: Harness) -> None:
    asked = {"temperature": 0, "max_tokens": 20}
    assert ask(server, tools=TOOLS, tool_choice="none", **asked)[1]["usage"] == ask(server, **asked)[1]["usage"]


def test_an_answer_is_of_its_form_where_it_has_no_calls(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 2800, "response_format": Greet}
    messages = [client.chat.completions.parse(**asked, seed=seed).choices[0].message for seed in range(4)]
    assert all(isinstance(message.parsed, Greet) or message.tool_calls for message in messages)


def function(**fields: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": "f"}),
        ("tools", {"tools": [5]}),
        ("tools", {"tools": [named(f"f{at}") for at in range(129)]}),
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [named("two words")]}),
        ("tools[0].function.name", {"tools": [named("")]}),
        ("tools[0].function.name", {"tools": [named(None)]}),
        ("tools[0].function.name", {"tools": [named("x" * 65)]}),
        ("tools[1].function.name", {"tools": [named("f"), named("f")]}),
        ("tools[0].function.description", {"tools": function(description=5)}),
        ("tools[0].function.strict", {"tools": function(strict="yes")}),
        ("tools[0].function.parameters", {"tools": function(parameters=[])}),
        ("tools[0].function.parameters", {"tools": function(parameters={"type": "string"})}),
        ("tools", {"tools": function(parameters={"type": "object", "properties": {"a": {"type": "wrong"}}})}),
        ("tools", {"tools": function(strict=True, parameters={"type": "object", "if": {}, "then": {}})}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.function.name", {"tools": TOOLS, "tool_choice": named("Other")}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": named("Greet")}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
        ("min_tokens", {"tools": TOOLS, "min_tokens": 3}),
        ("ignore_eos", {"tools": TOOLS, "ignore_eos": True}),
    ],
)
def test_what_is_wrong_with_tools_is_refused_by_name(server: Harness, param: str, fields: dict[str, object]) -> None:
    status, told = ask(server, **fields)
    assert (status, told["error"]["param"]) == (400, param), told
    assert told["error"]["code"]


@pytest.mark.parametrize("at", [0, 3, 6])
def test_the_function_whose_schema_cannot_be_honoured_is_named(server: Harness, at: int) -> None:
    tools = [named(f"f{number}") for number in range(7)]
    tools[at]["function"] |= {"strict": True, "parameters": {"type": "object", "if": {}, "then": {}}}
    status, told = ask(server, tools=tools)
    assert status == 400
    assert told["error"]["message"].startswith(f"tools: the function f{at} cannot be honoured: "), told
    assert "if" in told["error"]["message"]


def test_functions_and_calls_of_the_history_count_as_text_that_takes_a_turn(
    server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, sizes = server.service.turns, list[int]()
    run = turns.run
    monkeypatch.setattr(turns, "run", lambda client, size, work: (sizes.append(size), run(client, size, work))[1])
    long = {"type": "function", "function": {"name": "f", "description": "x" * 3000}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 5000})}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "z"},
    ]
    for asked, least in (({"tools": [long]}, 3000), ({"messages": history}, 5000)):
        sizes.clear()
        ask(server, **asked)
        assert least < sizes[0] < least + 1000


def test_as_many_functions_as_allowed_with_names_as_long_as_allowed(server: Harness) -> None:
    tools = [named(f"{at:03}".ljust(64, "x")) for at in range(128)]
    status, told = ask(server, tools=tools, tool_choice=tools[-1])
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")  # of this model
    status, told = ask(server, tools=tools[:4], tool_choice=tools[3])
    assert called_name(told) == tools[3]["function"]["name"]


def test_arguments_are_those_that_are_named_unless_the_schema_says_more(server: Harness) -> None:
    loud = {"type": "object", "properties": {"loud": {"type": "boolean"}}}
    for seed in range(4):
        told = ask(server, tools=function(parameters=loud), tool_choice=named("f"), seed=seed, max_tokens=300)[1]
        (one,) = told["choices"][0]["message"]["tool_calls"]
        assert json.loads(one["function"]["arguments"]).keys() <= {"loud"}


def called_name(told: dict[str, Any]) -> str:
    return str(told["choices"][0]["message"]["tool_calls"][0]["function"]["name"])


def test_a_function_that_is_not_strict_may_have_what_cannot_be_honoured(server: Harness) -> None:
    tools = function(parameters={"type": "object", "maxProperties": 0, "if": {}, "then": {}})
    status, told = ask(server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert status == 200, told
    assert told["headway"]["warnings"] == ['tools: not honoured: Unimplemented keys: ["if", "then"]']


def test_an_answer_that_is_cut_off_has_what_there_is_of_its_call(server: Harness) -> None:
    asked = {"tools": TOOLS, "tool_choice": named("Greet"), "temperature": 0}
    whole = ask(server, **asked)[1]["choices"][0]["message"]["tool_calls"][0]["function"]
    for most in range(1, 60, 7):
        choice = ask(server, **asked, max_tokens=most)[1]["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        assert choice["finish_reason"] in ("length", "tool_calls")
        assert all(whole["arguments"].startswith(each["function"]["arguments"]) for each in calls)
        assert not choice["message"]["content"]
