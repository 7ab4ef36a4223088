"""The endpoints that compare texts: embeddings, and scores and rankings by the cosine of those.

They ask the process of `--embedding-model` and never the engine. Whatever grows with the number of texts is done in
pieces between which the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import islice
from math import sqrt
from operator import mul
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import RequestError
from headway.request_limits import LIMITS
from headway.serve import validate
from headway.serve.access import ANSWERED
from headway.serve.embedder import ServedEmbedder
from headway.serve.problem import Problem, new_name
from headway.serve.prompting import INLINE_CHARS, client_of
from headway.serve.service import Service
from headway.serve.sse import while_connected
from headway.serve.vectors import (
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Input,
    Ranked,
    RankedList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextUsage,
)

T = TypeVar("T")
Given = str | list[int]  # a text, or its token ids

_AT_ONCE = 64  # vectors that are looked at before the event loop goes on


class TextVectors:
    """What each endpoint does with a decoded request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, request: Request, asked: EmbeddingRequest) -> Response:
        embedder = self._embedder(asked.model)
        size = _size(asked.dimensions, embedder.client.opened.size)
        if asked.encoding_format not in (None, "float", "base64"):
            allowed = f"encoding_format is {asked.encoding_format[:64]!r}; allowed: float, base64"
            raise RequestError(allowed, param="encoding_format")
        given, most = _given(asked.input), asked.truncate_prompt_tokens
        found, usage = await self._vectors(request, embedder, given, "input", most)
        data: list[bytes] = []
        is_text = asked.encoding_format == "base64"
        async for index, vector in _gently(enumerate(found)):
            cut = _cut(vector, size)
            told = b64encode(cut).decode() if is_text else array("f", cut).tolist()
            data.append(msgspec.json.encode(Embedding(index, told)))
        frame = msgspec.json.encode(EmbeddingList([], embedder.name, usage))
        return Response(frame.replace(b"[]", b"[" + b",".join(data) + b"]", 1), media_type="application/json")

    async def score(self, request: Request, asked: ScoreRequest) -> Response:
        embedder = self._embedder(asked.model)
        left, right = ([text] if isinstance(text, str) else text for text in (asked.text_1, asked.text_2))
        if not right or len(left) not in (1, len(right)):
            raise RequestError(
                f"text_1 has {len(left)} texts and text_2 {len(right)}; allowed: one against one or several, or as "
                "many as text_2 has",
                param="text_1",
            )
        found, usage = await self._vectors(request, embedder, [*left, *right], "text_2", asked.truncate_prompt_tokens)
        firsts, seconds = found[: len(left)], found[len(left) :]
        pairs = zip(firsts * (len(right) if len(left) == 1 else 1), seconds, strict=True)
        scores = [_cosine(*pair) async for pair in _gently(pairs)]
        data = [Score(index, score) for index, score in enumerate(scores)]
        told = ScoreList(f"score-{new_name()}", int(time.time()), embedder.name, data, usage)
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def rerank(self, request: Request, asked: RerankRequest) -> Response:
        embedder = self._embedder(asked.model)
        texts = [text if isinstance(text, str) else text.text for text in asked.documents]
        if not texts:
            raise RequestError("documents is empty; give at least one document", param="documents")
        if asked.top_n is not None and asked.top_n < 1:
            raise RequestError(f"top_n is {asked.top_n}; allowed: 1 or more", param="top_n")
        given = [asked.query, *texts]
        found, usage = await self._vectors(request, embedder, given, "documents", asked.truncate_prompt_tokens)
        scores = [_cosine(found[0], vector) async for vector in _gently(found[1:])]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        has_text = asked.return_documents is not False
        results = [
            Ranked(index, scores[index], Document(texts[index]) if has_text else None)
            for index in order[: asked.top_n or len(order)]
        ]
        told = RankedList(f"rerank-{new_name()}", embedder.name, results, usage)
        return Response(msgspec.json.encode(told), media_type="application/json")

    def _embedder(self, asked: str | None) -> ServedEmbedder:
        self._service.model()  # 503 while loading or draining
        embedder = self._service.embedder
        if embedder is None:
            raise Problem(
                404,
                "this server has no embedding model; start it with --embedding-model DIRECTORY",
                param="model",
                code="model_not_found",
            )
        validate.check_model(asked, embedder.name)
        return embedder

    async def _vectors(
        self, request: Request, embedder: ServedEmbedder, given: Sequence[Given], param: str, most: int | None
    ) -> tuple[list[bytes], TextUsage]:
        """A vector for each text, and the tokens they have."""
        limit, is_cut = _limit(most, embedder.max_tokens)
        if len(given) > LIMITS.texts:
            raise RequestError(f"{param} has {len(given)} texts; allowed: up to {LIMITS.texts}", param=param)
        with self._service.working(), self._service.tenants.visit(request.scope) as visit:
            tokens = await self._tokens(request, embedder, given, limit, is_cut=is_cut, param=param)
            num_tokens = sum(map(len, tokens))
            if num_tokens > LIMITS.texts_tokens:
                allowed = f"{param} has {num_tokens} tokens in all; allowed: up to {LIMITS.texts_tokens}; send fewer"
                raise RequestError(allowed, param=param)
            visit.charge(num_tokens)
            found = await while_connected(request.receive, embedder.client.embed(tokens))
            visit.settle(num_tokens)
        request.scope[ANSWERED] = lambda: {"prompt_tokens": num_tokens, "texts": len(given)}
        return found, TextUsage(num_tokens, num_tokens)

    async def _tokens(
        self,
        request: Request,
        embedder: ServedEmbedder,
        given: Sequence[Given],
        limit: int,
        *,
        is_cut: bool,
        param: str,
    ) -> list[list[int]]:
        """Token ids of every text, 1 to `limit` of each; what is long is done by a thread, in turn with others."""
        work = partial(_encode_all, embedder, given, limit, is_cut, param)
        num_chars = sum(len(each) for each in given)
        if num_chars <= INLINE_CHARS:
            return work()
        turn = self._service.turns.run(client_of(request), num_chars, work)
        return await while_connected(request.receive, turn)


def _encode_all(
    embedder: ServedEmbedder, given: Sequence[Given], limit: int, is_cut: bool, param: str
) -> list[list[int]]:
    names = [param] if len(given) == 1 else [f"{param}[{at}]" for at in range(len(given))]
    return [_encode(embedder, each, limit, is_cut, name) for each, name in zip(given, names, strict=True)]


def _encode(embedder: ServedEmbedder, given: Given, limit: int, is_cut: bool, name: str) -> list[int]:
    tokenizer, field = embedder.tokenizer, name.partition("[")[0]
    if isinstance(given, str):
        # The part of a text that is cut decides its first tokens; the rest is not read.
        text = given[: limit * tokenizer.longest_token] if is_cut else given
        tokens = tokenizer.encode(text) if is_cut else tokenizer.encode_within(text, limit)
    else:
        tokens = given
        vocab_size = embedder.client.opened.vocab_size
        wrong = [token for token in given if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(f"{name} has token id {wrong[0]}; allowed: 0 to {vocab_size - 1}", param=field)
    if not tokens and tokens is not None:
        raise RequestError(f"{name} has no tokens; give at least one", param=field)
    if tokens is None or (len(tokens) > limit and not is_cut):
        raise RequestError(
            f"{name} has {'far more' if tokens is None else len(tokens)} tokens; this model takes {limit}; shorten it, "
            "or set truncate_prompt_tokens to -1",
            param=field,
            code="context_length_exceeded",
        )
    ends = tokens[-1:] if tokens[-1] in tokenizer.special_ids else []
    return tokens if len(tokens) <= limit else tokens[: limit - len(ends)] + ends


def _given(asked: Input) -> list[Given]:
    """The texts of an `input`, which may be one, and one of token ids."""
    if isinstance(asked, str):
        return [asked]
    if not asked:
        raise RequestError("input is empty; give at least one text", param="input")
    if all(type(each) is int for each in asked):
        return [[each for each in asked if isinstance(each, int)]]
    texts: list[Given] = []
    for each in asked:
        if isinstance(each, int) or isinstance(each, str) != isinstance(asked[0], str):
            raise RequestError("input mixes texts and token ids; give one kind", param="input")
        texts.append(each if isinstance(each, str) else list(each))
    return texts


def _limit(most: int | None, max_tokens: int) -> tuple[int, bool]:
    """The most tokens of a text, and whether longer ones are cut to it."""
    if most is None:
        return max_tokens, False
    if most != -1 and not 1 <= most <= max_tokens:
        allowed = f"truncate_prompt_tokens is {most}; allowed: -1, or 1 to {max_tokens}"
        raise RequestError(allowed, param="truncate_prompt_tokens")
    return (max_tokens if most == -1 else most), True


def _size(asked: int | None, size: int) -> int:
    if asked is not None and not 1 <= asked <= size:
        raise RequestError(f"dimensions is {asked}; allowed: 1 to {size}", param="dimensions")
    return asked or size


def _cut(vector: bytes, size: int) -> bytes:
    """The first `size` numbers, scaled to length 1 again."""
    if 4 * size == len(vector):
        return vector
    numbers = array("f", vector[: 4 * size])
    length = sqrt(sum(map(mul, numbers, numbers))) or 1.0
    return array("f", [number / length for number in numbers]).tobytes()


def _cosine(left: bytes, right: bytes) -> float:
    """Of vectors of length 1; rounding may take it a little beyond 1."""
    cosine: float = sum(map(mul, array("f", left), array("f", right)))
    return max(-1.0, min(1.0, cosine))


async def _gently(values: Iterable[T]) -> AsyncIterator[T]:
    """One after the other, with room for everything else in between."""
    rest = iter(values)
    while part := list(islice(rest, _AT_ONCE)):
        for value in part:
            yield value
        await asyncio.sleep(0)
