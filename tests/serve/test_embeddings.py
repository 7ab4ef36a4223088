"""Vectors, scores and rankings over HTTP, by a real encoder in its own process."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from headway.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from headway.embedding.client import EmbeddingClient
from headway.embedding.model import load_embedding_model
from headway.embedding.source import open_embedding_source
from headway.modelfile.cache import ModelCache
from headway.request_limits import LIMITS
from headway.serve.embedder import open_embedder
from headway.serve.openapi import ENDPOINTS
from headway.text.tokenizer import Tokenizer
from serve_harness import Harness, serving
from tiny_encoders import write_tiny_encoder

OF_VECTORS = {"/v1/embeddings", "/v1/score", "/v1/rerank"}
TEXTS = ["a cat waits", "the kittens", "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "tiny"
    write_tiny_encoder(path)
    return path


@contextmanager
def embedding(folder: Path) -> Iterator[Harness]:
    with serving() as harness:
        model = ModelConfig(cache_dir=str(folder / "cache"), threads=1)
        server = ServerConfig(embedding_model=str(folder), log_level="error")
        config = ServeConfig(EngineConfig(model), server)

        async def open_it() -> None:
            harness.service.embedder = await open_embedder(config, ModelCache(folder / "cache"))
            assert harness.service.embedder is not None
            harness.service.metrics.vectors = harness.service.embedder.client

        harness.do(open_it)
        assert harness.service.embedder is not None
        try:
            yield harness
        finally:
            harness.do(harness.service.embedder.client.close)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Harness]:
    with embedding(folder) as harness:
        yield harness


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    tokenizer = Tokenizer.open(folder / "tokenizer.json")
    source = open_embedding_source(str(folder), ModelCache(folder / "cache"))
    vectors: np.ndarray = load_embedding_model(source, "auto", 1).embed([tokenizer.encode(text) for text in TEXTS])
    return vectors


def post(server: Harness, path: str, **body: object) -> Any:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"] | {"status": error.code}


def test_the_official_client_gets_vectors(server: Harness, client: openai.OpenAI, wanted: np.ndarray) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS)  # which asks for base64
    assert np.array_equal(np.array([each.embedding for each in found.data], np.float32), wanted)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("tiny", 13, 13)
    floats = client.embeddings.create(model="tiny", input=TEXTS[1], encoding_format="float")
    assert np.array_equal(np.array(floats.data[0].embedding, np.float32), wanted[1])
    ids = client.embeddings.create(model="tiny", input=[2, 4, 5, 8, 3], encoding_format="float")
    assert np.array_equal(np.array(ids.data[0].embedding, np.float32), wanted[0])
    many = client.embeddings.create(model="tiny", input=[[2, 4, 5, 8, 3], [2, 7, 3]])
    assert [many.data[at].embedding for at in (0, 1)] == [found.data[0].embedding, found.data[2].embedding]


def test_fewer_dimensions_have_length_one_again(server: Harness, client: openai.OpenAI, wanted: np.ndarray) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS, dimensions=8)
    cut = wanted[:, :8] / np.linalg.norm(wanted[:, :8].astype(np.float64), axis=1, keepdims=True)
    assert np.abs(np.array([each.embedding for each in found.data]) - cut).max() < 1e-6


def test_many_texts_come_back_in_order(server: Harness, client: openai.OpenAI, wanted: np.ndarray) -> None:
    found = client.embeddings.create(model="tiny", input=[TEXTS[at % 3] for at in range(2000)])
    vectors = np.array([each.embedding for each in found.data], np.float32)
    assert np.array_equal(vectors, wanted[np.arange(2000) % 3])


def test_score_and_rerank_go_by_the_cosine(server: Harness, wanted: np.ndarray) -> None:
    cosines = (wanted.astype(np.float64) @ wanted[0].astype(np.float64)).tolist()
    scored = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [each["score"] for each in scored["data"]] == pytest.approx(cosines, abs=1e-6)
    paired = post(server, "/v1/score", text_1=TEXTS, text_2=TEXTS)
    assert [each["score"] for each in paired["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    ranked = post(server, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]], top_n=2)
    best = sorted([(cosines[1], 0), (cosines[0], 1), (cosines[2], 2)], reverse=True)[:2]
    assert [each["index"] for each in ranked["results"]] == [index for _, index in best]
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-6)
    bare = post(server, "/v1/rerank", query="a", documents=TEXTS, return_documents=False)
    assert [each["document"] for each in bare["results"]] == [None] * 3


def test_long_texts_are_refused_or_cut_where_asked(server: Harness, wanted: np.ndarray) -> None:
    long = "cat " * 100
    told = post(server, "/v1/embeddings", input=["a", long])
    assert (told["status"], told["param"], told["code"]) == (400, "input", "context_length_exceeded")
    assert "input[1] has 102 tokens; this model takes 64" in told["message"]
    huge = post(server, "/v1/embeddings", input="cat " * 100_000)
    assert (huge["status"], huge["code"]) == (400, "context_length_exceeded")
    cut = post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    same = post(server, "/v1/embeddings", input=[[2, *[5] * 62, 3]])
    assert cut["data"] == same["data"]
    assert cut["usage"]["prompt_tokens"] == 64
    few = post(server, "/v1/embeddings", input=TEXTS[0], truncate_prompt_tokens=3)
    assert few["data"] == post(server, "/v1/embeddings", input=[2, 4, 3])["data"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("embeddings", {}, 400, "input"),
        ("embeddings", {"input": []}, 400, "input"),
        ("embeddings", {"input": [[]]}, 400, "input"),
        ("embeddings", {"input": [1, "x"]}, 400, "input"),
        ("embeddings", {"input": [[1], "x"]}, 400, "input"),
        ("embeddings", {"input": [[1], 2]}, 400, "input"),
        ("embeddings", {"input": [32]}, 400, "input"),
        ("embeddings", {"input": [-1]}, 400, "input"),
        ("embeddings", {"input": {"text": "x"}}, 400, "input"),
        ("embeddings", {"input": ["x"] * 2049}, 400, "input"),
        ("embeddings", {"input": "x", "dimensions": 49}, 400, "dimensions"),
        ("embeddings", {"input": "x", "encoding_format": "bits"}, 400, "encoding_format"),
        ("embeddings", {"input": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("embeddings", {"input": "x", "model": "echo"}, 404, "model"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("score", {"text_1": "a", "text_2": []}, 400, "text_1"),
        ("rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n"),
        ("rerank", {"query": "a", "documents": [{"text": 1}]}, 400, "documents"),
    ],
)
def test_what_is_wrong_is_named(server: Harness, path: str, body: dict[str, object], status: int, param: str) -> None:
    told = post(server, f"/v1/{path}", **body)
    assert (told["status"], told["param"]) == (status, param)


def test_models_metrics_and_the_answering_model(server: Harness, client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() == {"echo", "tiny"}
    assert client.models.retrieve("tiny").id == "tiny"
    assert cards["tiny"].max_model_len == 64  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        lines = page.read().decode().splitlines()
    assert "headway_embedding_restarts_total 0.0" in lines
    assert any(line.startswith("headway_embedding_texts_total ") for line in lines)


def test_all_texts_together_have_a_limit(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.serve.embeddings.LIMITS", replace(LIMITS, texts_tokens=12))
    assert "data" in post(server, "/v1/embeddings", input=[[2, 4, 3]] * 4)
    told = post(server, "/v1/embeddings", input=[*([[2, 4, 3]] * 3), [2, 4, 5, 3]])
    assert (told["status"], told["param"]) == (400, "input")
    assert "13 tokens in all; allowed: up to 12" in told["message"]


def test_the_examples_of_the_page_work(server: Harness) -> None:
    examples = {each.path: each.example for each in ENDPOINTS if "likeness" in each.summary or each.path in OF_VECTORS}
    assert examples.keys() == OF_VECTORS
    assert all("usage" in post(server, path, **example) for path, example in examples.items())


def test_a_server_without_such_a_model_says_how_to_get_one(folder: Path) -> None:
    with serving() as bare:
        told = post(bare, "/v1/embeddings", input="x")
        assert (told["status"], told["code"]) == (404, "model_not_found")
        assert "--embedding-model" in told["message"]


async def test_no_model_is_opened_unless_it_is_named(tmp_path: Path) -> None:
    assert await open_embedder(ServeConfig(), ModelCache(tmp_path)) is None


def test_base64_is_of_float32_numbers(server: Harness, wanted: np.ndarray) -> None:
    told = post(server, "/v1/embeddings", input=TEXTS[2], encoding_format="base64")
    data = base64.b64decode(told["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(data, "<f4"), wanted[2])


def test_vectors_and_answers_do_not_hold_each_other_up(server: Harness, client: openai.OpenAI, folder: Path) -> None:
    """A stopped process of vectors: chats go on, and the vectors come when it goes on."""
    assert server.service.embedder is not None
    embedder: EmbeddingClient = server.service.embedder.client

    async def waits() -> tuple[bool, str]:
        process = embedder._process
        assert process is not None
        process.send_signal(19)  # SIGSTOP
        asking = asyncio.create_task(embedder.embed([[2, 4, 3]]))
        answer = await asyncio.to_thread(
            client.chat.completions.create, model="echo", messages=[{"role": "user", "content": "x"}], max_tokens=4
        )
        is_waiting = not asking.done()
        process.send_signal(18)  # SIGCONT
        await asking
        return is_waiting, str(answer.choices[0].finish_reason)

    assert server.do(waits) == (True, "length")


def test_a_server_that_ends_before_its_vectors_are_there_says_so(folder: Path) -> None:
    with embedding(folder) as server, ThreadPoolExecutor(1) as pool:
        assert server.service.embedder is not None
        process = server.service.embedder.client._process
        assert process is not None
        process.send_signal(19)  # SIGSTOP
        is_idle = lambda: asyncio.sleep(0.01, server.service._idle.is_set())  # noqa: E731
        asked = pool.submit(post, server, "/v1/embeddings", input="a cat")
        while server.do(is_idle):
            pass
        assert server.do(lambda: server.service.drain(0.1)) is False
        told = asked.result(timeout=10)
        assert (told["status"], told["code"]) == (503, "not_ready")
        assert "shutting down" in told["message"]
        assert server.do(is_idle)
