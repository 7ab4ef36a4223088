"""The official client, unchanged, over real HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from echo_engine import EchoEngine
from serve_harness import Harness, serving


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_answers_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=user("héllo"), temperature=0, max_tokens=14)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "user: héllo\nu")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (13, 14, 27)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.object == "chat.completion"
    assert answer._request_id


def test_chat_stream_says_the_same_as_the_whole(client: openai.OpenAI) -> None:
    ask = {"model": "echo", "messages": user("añ \U0001f600 z"), "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [finish for finish in finishes if finish] == ["length"]
    assert finishes[-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_options_carries_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="echo", messages=user("x"), max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_chunk_counts_so_far_if_asked_to(client: openai.OpenAI, kind: str) -> None:
    def stream(client: openai.OpenAI, **options: bool) -> openai.Stream[Any]:
        ask = {"model": "echo", "temperature": 0, "max_tokens": 5, "stream": True, "stream_options": options}
        if kind == "chat":
            return client.chat.completions.create(**ask, messages=user("x"))
        return client.completions.create(**ask, prompt="user: x\n")

    *chunks, last = list(stream(client, **CONTINUOUS))
    assert all(chunk.usage.prompt_tokens_details is None for chunk in chunks)  # known at the end
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens_details.cached_tokens) == ([], 5, 3)
    assert all(chunk.usage is None for chunk in stream(client, continuous_usage_stats=True))
    with (
        serving(EchoEngine(hold_after=2)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
        stream(client, **CONTINUOUS) as chunks,
    ):
        assert chunks.response.headers.get("x-headway-ignored") is None
        text = ""
        while text != "us":
            chunk = next(chunks)
            part = chunk.choices[0].delta.content if kind == "chat" else chunk.choices[0].text
            text += part
            counts = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)
            assert not part or counts == (8, len(text), 8 + len(text))


def test_default_chat_length_is_the_rest_of_a_small_context(server: Harness, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="echo", messages=user("x"), temperature=0)
    assert server.engine.submits[-1].params.max_tokens == 512 - len("user: x\n")


def test_default_completion_length_is_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="abc", temperature=0)
    assert answer.choices[0].text == "abcabcabcabcabca"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["aba"]), (["ab", "cd"], ["aba", "cdc"]), ([98, 99], ["aba"]), ([[98], [100, 101]], ["aaa", "cdc"])],
)
def test_completion_takes_every_shape_of_prompt(client: openai.OpenAI, prompt: object, texts: list[str]) -> None:
    answer = client.completions.create(model="echo", prompt=prompt, temperature=0, max_tokens=3)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_completion_streams(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="echo",
        prompt=["ab", "cd"],
        temperature=0,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["ababababa", "cdcdcdcdc"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 18)


def test_n_answers_share_a_parent_and_differ(server: Harness, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=user("x"), n=3, seed=7, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    submits = server.engine.submits[-3:]
    assert [submit.parent for submit in submits] == [None, submits[0].id, submits[0].id]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user: x\n")
    assert answer.usage.completion_tokens == 24


def test_n_answers_stream(client: openai.OpenAI) -> None:
    ask = {"model": "echo", "messages": user("x"), "n": 2, "seed": 7, "max_tokens": 8}
    whole = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_seed_decides_and_its_absence_varies(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        answer = client.completions.create(model="echo", prompt="x", max_tokens=12, seed=seed)
        return answer.choices[0].text

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(None) != text(None)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo", messages=user("x"), temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == list("user")
    assert content[0].bytes == [ord("u")]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("u", -0.5), ("v", -1.5)]
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=user("x"), temperature=0, max_tokens=4, logprobs=True, top_logprobs=2, stream=True
        )
    )
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry for part in parts for entry in part] == content


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="abc", temperature=0, max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}]
    assert logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_cuts_before_it_and_counts_to_its_end(is_stream: bool) -> None:
    with (
        serving(EchoEngine(hold_after=50)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        check_stop_string(server, client, is_stream)


def check_stop_string(server: Harness, client: openai.OpenAI, is_stream: bool) -> None:
    ask = {"model": "echo", "prompt": "abcdefgh", "temperature": 0, "max_tokens": 400, "stop": ["zz", "ef"]}
    if is_stream:
        chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = client.completions.create(**ask)
        text, finish, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert (text, finish) == ("abcd", "stop")
    assert usage is not None
    assert usage.completion_tokens == 6
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert server.engine.aborts[-1][1] == "stop"


def test_stop_token_is_counted_and_not_shown(client: openai.OpenAI) -> None:
    ask = {"model": "echo", "prompt": "abcd", "temperature": 0, "max_tokens": 50}
    answer = client.completions.create(**ask, extra_body={"stop_token_ids": [1 + ord("c")]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_end_token_stops_unless_ignored() -> None:
    with (
        serving(EchoEngine(eos_after=3)) as harness,
        openai.OpenAI(base_url=f"{harness.url}/v1", api_key="any", max_retries=0) as client,
    ):
        answer = client.completions.create(model="echo", prompt="abcd", temperature=0, max_tokens=8)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
        ask = {"model": "echo", "prompt": "abcd", "temperature": 0, "max_tokens": 8}
        answer = client.completions.create(**ask, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"


def test_sampling_fields_reach_the_engine(server: Harness, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="echo",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": []},
            {"role": "tool", "content": "done", "tool_call_id": "1"},
        ],
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"65": 1},
        seed=2**63 - 1,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "cache_salt": "tenant-1",
            "priority": 3,
            "dry_multiplier": 0.8,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["b", "cd"],
            "xtc_probability": 0.5,
            "field_from_the_future": {"a": 1},
        },
    )
    submit = server.engine.submits[-1]
    params = submit.params
    assert bytes(token - 1 for token in submit.tokens).decode() == (
        "developer: be brief\nuser: ab\nassistant: c\ntool: done\n"
    )
    assert (params.max_tokens, params.min_tokens, params.top_k) == (5, 2, 5)
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.9, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.25, -0.5, 1.2)
    assert params.logit_bias == {65: 1.0}
    assert (params.dry_multiplier, params.dry_base, params.dry_range, params.xtc_probability) == (0.8, 1.75, 0, 0.5)
    assert params.dry_breakers == (1 + ord("b"),)  # no token holds both c and d
    assert (submit.seed, submit.salt, submit.priority) == (2**63 - 1, "tenant-1", 3)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_cancel_mid_stream_frees_the_engine(server: Harness, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="echo", prompt="x" * 100, temperature=0, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_idle()


async def test_async_client_streams_many_at_once(server: Harness) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:

        async def ask(index: int) -> str:
            stream = await client.completions.create(
                model="echo", prompt=f"<{index}>", temperature=0, max_tokens=30, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(ask(index) for index in range(40)))
    assert texts == [(f"<{index}>" * 30)[:30] for index in range(40)]
    server.wait_idle()


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, None),
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"messages": user("refuse")}, openai.BadRequestError, None),
    ],
)
def test_errors_have_the_clients_classes(
    client: openai.OpenAI, change: dict[str, object], kind: type[openai.APIStatusError], code: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "echo", "messages": user("x"), **change})
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
