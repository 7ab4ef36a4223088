"""The shapes of embeddings, scores and rankings: OpenAI's, vLLM's and Jina's."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headway.serve.openai import Int

Input = str | list[str | Int | list[Int]]


class EmbeddingRequest(Struct, kw_only=True):
    """OpenAI's: a text, texts, or token ids of one or several."""

    input: Input
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Int | None = None
    user: str | None = None
    truncate_prompt_tokens: Int | None = None  # -1: to what the model takes


class Document(Struct):
    text: str


class ScoreRequest(Struct, kw_only=True):
    """vLLM's: one text against several, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    user: str | None = None


class RerankRequest(Struct, kw_only=True):
    """Jina's and Cohere's: the documents by their likeness to a query."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: Int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Int | None = None
    user: str | None = None


class TextUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    index: int
    embedding: list[float] | str  # floats, or base64 of float32 numbers with the little end first
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: TextUsage
    object: Literal["list"] = "list"


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: TextUsage
    object: Literal["list"] = "list"


class Ranked(Struct):
    index: int
    relevance_score: float
    document: Document | None = None


class RankedList(Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage
