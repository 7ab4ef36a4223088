"""Prompts echoed and scored, the best of several answers, text between two others: over HTTP, from a real engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headway.build import build_engine
from headway.config import EngineConfig
from headway.grammar.check import GrammarChecker
from headway.text.tokenizer import Tokenizer
from raw_http import call
from serve_harness import Harness, byte_tokenizer, serving
from tiny_dir import tiny_options, write_tiny_model

TEXT = "/v1/completions"
END = 263
INFILL = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("model")
    spec = write_tiny_model(folder)
    tokenizer = Tokenizer.open(folder / "tokenizer.json")
    engine: Any = build_engine(EngineConfig.of(**tiny_options(folder)))
    grammars = GrammarChecker(folder / "tokenizer.json", spec.vocab_size, [END])
    with serving(engine, name="tiny", tokenizer=tokenizer, grammars=grammars) as made:
        yield made
        made.wait_idle()


def ask(server: Harness, **fields: object) -> dict[str, Any]:
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": "hello", "max_tokens": 8, **fields})
    assert status == 200, told
    return dict(told)


def encoded(server: Harness, text: str) -> list[int]:
    _, told, _ = call(server.url, "POST", "/tokenize", {"text": text})
    return list(told["tokens"])


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_prompt_is_scored_as_the_answer_that_it_was(server: Harness, num_top: int) -> None:
    asked = {"seed": 3, "max_tokens": 60, "logprobs": num_top, "structured_outputs": {"regex": "[a-z]{99,}"}}
    prompt = [*encoded(server, "hello "), END, *encoded(server, "world")]
    answer = ask(server, prompt=prompt, **asked)["choices"][0]["logprobs"]
    ids = [token for text in answer["tokens"] for token in encoded(server, text)]
    assert len(ids) == 60
    told = ask(server, prompt=[*prompt, *ids], echo=True, logprobs=num_top, max_tokens=0)
    scored = told["choices"][0]["logprobs"]
    assert told["usage"] == {
        "prompt_tokens": len(prompt) + 60,
        "completion_tokens": 0,
        "total_tokens": len(prompt) + 60,
    }
    assert scored["token_logprobs"][0] is None
    assert scored["token_logprobs"][len(prompt) :] == answer["token_logprobs"]
    assert (scored["top_logprobs"] or [])[len(prompt) :] == (answer["top_logprobs"] or [])
    assert len(scored["tokens"]) == len(scored["text_offset"]) == len(prompt) + 60


def test_the_answer_behind_a_scored_prompt_is_as_without(server: Harness) -> None:
    for fields in ({"temperature": 0}, {"seed": 4, "presence_penalty": 1.5}, {"seed": 9, "n": 3}):
        plain = ask(server, logprobs=2, **fields)["choices"]
        echoed = ask(server, logprobs=2, echo=True, **fields)["choices"]
        for one, other in zip(plain, echoed, strict=True):
            assert other["text"] == "hello" + one["text"]
            num = len(one["logprobs"]["tokens"])
            assert other["logprobs"]["token_logprobs"][-num:] == one["logprobs"]["token_logprobs"]
            first = one["logprobs"]["text_offset"]
            assert other["logprobs"]["text_offset"][-num:] == [len("hello") + offset for offset in first]


def test_a_stream_begins_with_the_prompt(server: Harness) -> None:
    fields = {"prompt": ["hello", "hell"], "logprobs": 1, "echo": True, "seed": 4, "n": 2}
    whole = ask(server, **fields)["choices"]
    _, told, _ = call(server.url, "POST", TEXT, {"max_tokens": 8, "stream": True, **fields})
    lines = [line.removeprefix(b"data: ") for line in told.split(b"\n") if line.startswith(b"data: {")]
    parts: dict[int, list[Any]] = {}
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        parts.setdefault(choice["index"], []).append(choice)
    for one in whole:
        found = parts[one["index"]]
        assert "".join(each["text"] for each in found) == one["text"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [value for each in found if each["logprobs"] for value in each["logprobs"][name]] == one["logprobs"][
                name
            ]


def test_an_echo_without_log_probabilities_is_the_text_alone(server: Harness) -> None:
    plain, echoed = (ask(server, temperature=0, echo=echo)["choices"][0] for echo in (False, True))
    assert (echoed["text"], echoed["logprobs"]) == ("hello" + plain["text"], None)
    told = ask(server, echo=True, max_tokens=0, n=2)
    assert [(each["text"], each["finish_reason"]) for each in told["choices"]] == [("hello", "length")] * 2
    one = ask(server, prompt="h", echo=True, max_tokens=0, logprobs=1)["choices"][0]["logprobs"]
    assert one == {"tokens": ["h"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.mark.parametrize("num_top", [None, 1])
def test_a_prompt_alone_is_told_of_as_other_answers_are(
    server: Harness, num_top: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "headway.serve.access"):
        told = ask(server, prompt=list(range(9)), echo=True, logprobs=num_top, max_tokens=0, flavour=1)
        server.wait_idle()
        while not (lines := [record.getMessage() for record in caplog.records if TEXT in record.getMessage()]):
            time.sleep(0.01)
    assert lines[0].endswith("9+0 tokens length")
    assert told["headway"]["warnings"] == ["the field 'flavour' is not understood and was ignored"]
    if num_top is not None:
        assert told["headway"]["total_ms"] > 0
        status, explained, _ = call(server.url, "GET", f"/v1/requests/{told['id']}/explain")
        assert (status, explained["num_answers"]) == (200, 1)


def test_others_stay_as_they_are_while_prompts_are_scored(server: Harness) -> None:
    plain = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    scored = {"prompt": "hello world " * 8, "echo": True, "logprobs": 2, "max_tokens": 0}
    alone, alone_scored = ask(server, **plain)["choices"], ask(server, **scored)["choices"]
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, server, **plain) for _ in range(3)]
        scores = [pool.submit(ask, server, **scored) for _ in range(3)]
        assert [each.result()["choices"] for each in others] == [alone] * 3
        assert [each.result()["choices"] for each in scores] == [alone_scored] * 3


def mean(choice: dict[str, Any]) -> float:
    values = choice["logprobs"]["token_logprobs"]
    return sum(values) / len(values)


def test_the_best_of_several_answers_are_the_most_likely_ones_per_token(server: Harness) -> None:
    fields = {"seed": 6, "prompt": ["hello", "he"], "logprobs": 0}
    every = ask(server, n=5, **fields)["choices"]
    told = ask(server, n=2, best_of=5, **fields)
    for prompt in (0, 1):
        expected = sorted(every[5 * prompt : 5 * prompt + 5], key=mean, reverse=True)[:2]
        found = told["choices"][2 * prompt : 2 * prompt + 2]
        assert [each["text"] for each in found] == [each["text"] for each in expected]
    assert [each["index"] for each in told["choices"]] == [0, 1, 2, 3]
    assert told["usage"]["completion_tokens"] == sum(len(each["logprobs"]["tokens"]) for each in every)
    assert ask(server, best_of=3, seed=6)["choices"][0]["logprobs"] is None


def test_text_between_two_others_where_the_vocabulary_knows_it() -> None:
    inner = byte_tokenizer()._inner
    inner.add_special_tokens(INFILL)
    with serving(tokenizer=Tokenizer(inner)) as server:
        status, _, _ = call(server.url, "POST", TEXT, {"prompt": "a", "suffix": "c", "max_tokens": 1})
        assert status == 200
        assert list(server.engine.submits[-1].tokens) == [257, 1 + ord("a"), 258, 1 + ord("c"), 259]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 17}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("best_of", {"best_of": "2"}),
        ("suffix", {"suffix": "x"}),
        ("suffix", {"suffix": "x", "prompt": [1, 2]}),
        ("echo", {"echo": True, "suffix": "x"}),
        ("echo", {"echo": "yes"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 0, "echo": True, "stream": True}),
        ("max_tokens", {"max_tokens": 0, "echo": True, "best_of": 2}),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server: Harness, param: str, fields: dict[str, object]) -> None:
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": "hello", "max_tokens": 5, **fields})
    assert (status, told["error"]["param"]) == (400, param), told
