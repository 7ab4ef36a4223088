"""Answers of a wanted form over HTTP, by OpenAI's client, from a real engine: valid whenever they end by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from headway.build import build_engine
from headway.config import EngineConfig
from headway.grammar import source
from headway.grammar.check import GrammarChecker
from headway.request_limits import LIMITS
from headway.text.tokenizer import Tokenizer
from raw_http import call
from serve_harness import Harness, serving
from tiny_dir import tiny_options, write_tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "hello"}]


class Said(BaseModel):
    model_config = ConfigDict(extra="forbid")
    word: Literal["hello", "held"]
    is_well: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("model")
    spec = write_tiny_model(folder)
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


def test_parse_gives_an_object_of_the_clients_own_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=USER, response_format=Said, max_tokens=300)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Said)


def test_a_stream_is_the_same_answer_in_parts(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": USER, "seed": 3, "max_tokens": 300}
    whole = client.chat.completions.parse(response_format=Said, **ask).choices[0].message
    with client.chat.completions.stream(response_format=Said, **ask) as stream:
        for _ in stream:
            pass
        last = stream.get_final_completion().choices[0].message
    assert (last.content, last.parsed) == (whole.content, whole.parsed)


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        ({"choice": ["hello world", "held\n"]}, lambda text: text in ("hello world", "held\n")),
        ({"regex": "^h[ae]llo w{2,3}$"}, lambda text: re.fullmatch("h[ae]llo w{2,3}", text)),
        (
            {"grammar": 'root ::= "he" rest\nrest ::= "l" | "ll" rest'},
            lambda text: re.fullmatch("hel(ll)*|he(ll)*l", text),
        ),
        ({"json": Said.model_json_schema()}, Said.model_validate_json),
        ({"json": json.dumps(Said.model_json_schema())}, Said.model_validate_json),
    ],
)
def test_n_answers_to_a_text_have_the_form_each(client: openai.OpenAI, form: object, is_right: Any) -> None:
    outputs = {"structured_outputs": form}
    answer = client.completions.create(model="tiny", prompt="hello", n=3, max_tokens=200, extra_body=outputs, seed=1)
    ended = [choice.text for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(is_right(text) for text in ended)


def test_what_is_left_out_is_a_warning_and_in_strict_mode_a_refusal(server: Harness) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "if": {}, "then": {}}

    def ask(**format: object) -> tuple[int, dict[str, Any]]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **format}}
        status, told, _ = call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 40, "response_format": form})
        return status, told

    status, told = ask()
    assert status == 200
    assert told["headway"]["warnings"] == ['response_format: not honoured: Unimplemented keys: ["if", "then"]']
    status, told = ask(strict=True)
    assert (status, told["error"]["param"]) == (400, "response_format")
    assert "Unimplemented keys" in told["error"]["message"]


def wrong(**fields: object) -> Any:
    name = str(fields.pop("param", "response_format"))
    return pytest.param(name, fields, id=str(fields)[:60])


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        wrong(response_format={"type": "xml"}, param="response_format.type"),
        wrong(response_format={"type": 5}, param="response_format.type"),
        wrong(response_format="json"),
        wrong(response_format={"type": "json_schema"}, param="response_format.json_schema"),
        wrong(response_format={"type": "json_schema", "json_schema": {}}, param="response_format.json_schema"),
        wrong(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}),
        wrong(response_format={"type": "json_object"}, min_tokens=3, param="min_tokens"),
        wrong(response_format={"type": "json_object"}, ignore_eos=True, param="ignore_eos"),
        wrong(structured_outputs={}, param="structured_outputs"),
        wrong(structured_outputs={"regex": "a", "choice": ["b"]}, param="structured_outputs"),
        wrong(structured_outputs={"regex": "("}, param="structured_outputs.regex"),
        wrong(structured_outputs={"choice": []}, param="structured_outputs.choice"),
        wrong(structured_outputs={"choice": ["x"] * 2000}, param="structured_outputs.choice"),
        wrong(structured_outputs={"choice": [1]}, param="structured_outputs.choice"),
        wrong(structured_outputs={"grammar": "start: nothing"}, param="structured_outputs.grammar"),
        wrong(structured_outputs={"json": "[1"}, param="structured_outputs.json"),
        wrong(structured_outputs={"json": "[1]"}, param="structured_outputs.json"),
        wrong(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}, param="structured_outputs"),
    ],
)
def test_a_form_that_is_wrong_is_refused_by_name(server: Harness, param: str, fields: dict[str, object]) -> None:
    for path, prompt in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hello"})):
        status, told, _ = call(server.url, "POST", path, {**prompt, **fields, "max_tokens": 5})
        assert (status, told["error"]["param"]) == (400, param), told
    status, _, _ = call(
        server.url, "POST", CHAT, {"messages": USER, "response_format": {"type": "text"}, "max_tokens": 2}
    )
    assert status == 200


def test_a_grammar_as_long_as_allowed_is_honoured_and_one_character_more_is_refused(server: Harness) -> None:
    def ask(num_chars: int) -> tuple[int, dict[str, Any]]:
        grammar = 'start: "hello" // '
        grammar += "x" * (num_chars - len(source.lark(grammar)))
        asked = {"prompt": "hello", "max_tokens": 9, "structured_outputs": {"grammar": grammar}}
        status, told, _ = call(server.url, "POST", TEXT, asked)
        return status, told

    status, told = ask(LIMITS.grammar_chars)
    assert (status, told["choices"][0]["text"]) == (200, "hello")
    status, told = ask(LIMITS.grammar_chars + 1)
    assert (status, told["error"]["param"]) == (400, "structured_outputs.grammar")


def test_a_grammar_that_becomes_too_complex_ends_its_own_answer_alone(server: Harness) -> None:
    hard = {
        "structured_outputs": {"regex": "(.*a.{900}b|.*c.{800}d|.*e.{700}f)*x"},
        "prompt": "hello",
        "max_tokens": 250,
    }
    status, told, _ = call(server.url, "POST", TEXT, hard)
    assert status == 200 or told["error"]["code"] == "grammar_too_complex", told
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": "hello", "max_tokens": 5, "ignore_eos": True})
    assert (status, told["usage"]["completion_tokens"]) == (200, 5)


def test_a_grammar_that_becomes_too_complex_never_ends_by_itself(server: Harness) -> None:
    fields = {f"field{at}": {"type": "string"} for at in range(900)}  # all optional: too many may come next
    schema = {"type": "object", "properties": fields, "minProperties": 1}
    asked = {"prompt": "hello", "max_tokens": 60, "structured_outputs": {"json": schema}}
    status, told, _ = call(server.url, "POST", TEXT, asked)
    assert (status, told.get("error", {}).get("code")) == (400, "grammar_too_complex"), told
    _, told, _ = call(server.url, "POST", TEXT, {**asked, "stream": True})
    assert "grammar_too_complex" in str(told)


def test_nothing_else_waits_while_grammars_are_checked(tmp_path: Path) -> None:
    spec = write_tiny_model(tmp_path)
    tokenizer = Tokenizer.open(tmp_path / "tokenizer.json")
    engine: Any = build_engine(EngineConfig.of(**tiny_options(tmp_path)))
    grammars = GrammarChecker(tmp_path / "tokenizer.json", spec.vocab_size, [263], check_s=300.0)
    with serving(engine, name="tiny", tokenizer=tokenizer, grammars=grammars) as server, ThreadPoolExecutor(3) as pool:

        def ask(**fields: object) -> int:
            return call(server.url, "POST", CHAT, {"messages": USER, "max_tokens": 4, **fields}, timeout_s=30)[0]

        def held(choice: str) -> int:
            return ask(structured_outputs={"choice": [choice]})

        assert held("known") == 200
        (child,) = grammars._children.idle
        os.kill(child._process.pid, signal.SIGSTOP)
        try:
            slow = [pool.submit(held, choice) for choice in ("one", "two", "three")]
            time.sleep(1)  # all threads that check are at work
            assert (ask(), held("known")) == (200, 200)
            assert not any(each.done() for each in slow)
        finally:
            os.kill(child._process.pid, signal.SIGCONT)
        assert [each.result(60) for each in slow] == [200, 200, 200]


def test_an_answer_ends_where_an_expression_matches(server: Harness) -> None:
    ask = {"prompt": "hello", "max_tokens": 60, "seed": 5, "logprobs": 0}
    _, plain, _ = call(server.url, "POST", TEXT, ask)
    _, ended, _ = call(server.url, "POST", TEXT, {**ask, "stop_regex": ["[a-z][^a-z]", "[0-9]{2}"]})
    (whole,), (found,) = plain["choices"], ended["choices"]
    at = re.search(r"[a-z][^a-z]|[0-9]{2}", whole["text"])
    assert at is not None
    assert (found["text"], found["finish_reason"]) == (whole["text"][: at.end()], "stop")
    num = len(found["logprobs"]["tokens"])
    assert found["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:num]
    assert ended["usage"]["completion_tokens"] == num
    with_stop = {**ask, "stop_regex": "[a-z][^a-z]", "stop": whole["text"][at.start() : at.end()]}
    _, both, _ = call(server.url, "POST", TEXT, with_stop)
    assert both["choices"][0]["text"] == whole["text"][: at.start()]
    _, told, _ = call(server.url, "POST", TEXT, {**ask, "stop_regex": "[a-z][^a-z]", "stream": True, "n": 2})
    texts = {0: "", 1: ""}
    for line in told.split(b"\n"):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts[0] == found["text"]


@pytest.mark.parametrize("stop", ["a*", "(", ["x"] * 17, "y" * 257, "", 5, r"(a)\1"])
def test_an_expression_that_is_wrong_is_refused_by_name(server: Harness, stop: object) -> None:
    for path, prompt in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hello"})):
        status, told, _ = call(server.url, "POST", path, {**prompt, "stop_regex": stop, "max_tokens": 5})
        assert (status, told["error"]["param"]) == (400, "stop_regex"), told
