"""The real engine behind the real server, over an executor whose every token depends on its whole prefix."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from hash_engine import hash_engine
from hashing import oracle
from headway.values.params import SamplingParams
from serve_harness import Harness, byte_tokenizer, serving

TOKENIZER = byte_tokenizer()


async def post(server: Harness, body: dict[str, Any], cut_after: int | None) -> bytes:
    """The whole response, or what came until `cut_after` bytes of it were read and the connection dropped."""
    reader, writer = await asyncio.open_connection(urlsplit(server.url).hostname, urlsplit(server.url).port)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    got = await reader.read() if cut_after is None else await reader.read(cut_after)
    writer.close()
    return got


def text_of(response: bytes, is_stream: bool) -> str:
    assert response.startswith(b"HTTP/1.1 200"), response[:300]
    if not is_stream:
        return str(json.loads(response.partition(b"\r\n\r\n")[2])["choices"][0]["text"])
    events = [line[6:] for line in response.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_right_while_others_leave_and_every_block_comes_back(depth: int) -> None:
    draw = random.Random(depth)
    shared = [draw.randrange(50) for _ in range(12)]
    asks: list[tuple[dict[str, Any], int | None]] = []
    for index in range(200):
        prompt = shared[: draw.randrange(13)] + [draw.randrange(50) for _ in range(draw.randrange(1, 10))]
        body = {"prompt": prompt, "max_tokens": draw.randrange(1, 30), "seed": index, "stream": draw.random() < 0.5}
        asks.append((body, draw.choice([0, 1, 500]) if draw.random() < 0.3 else None))

    async def everything() -> list[bytes]:
        return await asyncio.gather(*(post(server, body, cut) for body, cut in asks))

    with serving(hash_engine(depth), name="hash") as server:  # type: ignore[arg-type]
        responses = asyncio.run(everything())
        for (body, cut), response in zip(asks, responses, strict=True):
            if cut is None:
                params = SamplingParams(max_tokens=body["max_tokens"])
                expected = oracle(body["prompt"], params, body["seed"], frozenset())
                assert text_of(response, body["stream"]) == TOKENIZER.decode(expected)
        server.wait_idle()
        assert server.service._num_working == 0
        assert server.service._open_ids == set()


def test_cached_tokens_and_copies_are_counted() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        body = {"prompt": list(range(1, 41)), "max_tokens": 4, "seed": 1}
        usages = []
        for _ in range(2):
            response = asyncio.run(post(server, body, None))
            usages.append(json.loads(response.partition(b"\r\n\r\n")[2])["usage"])
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 39]
        many = json.loads(
            asyncio.run(post(server, {**body, "n": 4, "prompt": [7] * 30}, None)).partition(b"\r\n\r\n")[2]
        )
        assert len(many["choices"]) == 4
        assert many["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert many["usage"]["prompt_tokens"] == 30
