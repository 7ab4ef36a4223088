"""The OpenAPI document, assembled from the very structs that requests are decoded to."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headway.config import DEFAULT_MODEL
from headway.serve import openai, vectors

_JSON = "application/json"
_TALK = [{"role": "user", "content": "What is the capital of France?"}]


class Endpoint(NamedTuple):
    """One path and verb. `asked` and `answered` are structs; where an answer has none, `media` is its type."""

    path: str
    verb: str
    summary: str
    asked: Any = None
    answered: Any = None
    example: Any = None
    media: str = _JSON


ENDPOINTS = (
    Endpoint(
        *("/v1/chat/completions", "post", "Answer a conversation", openai.ChatRequest, openai.ChatResponse),
        example={"messages": _TALK, "max_tokens": 64},
    ),
    Endpoint(
        *("/v1/completions", "post", "Continue a text", openai.CompletionRequest, openai.CompletionUsageChunk),
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Endpoint(
        *("/v1/embeddings", "post", "Vectors of texts", vectors.EmbeddingRequest, vectors.EmbeddingList),
        example={"input": ["The vehicle never waits", "Requests board at every step"]},
    ),
    Endpoint(
        *("/v1/score", "post", "How alike texts are", vectors.ScoreRequest, vectors.ScoreList),
        example={"text_1": "a cat", "text_2": ["a kitten", "a train"]},
    ),
    Endpoint(
        *("/v1/rerank", "post", "Documents by their likeness to a query", vectors.RerankRequest, vectors.RankedList),
        example={"query": "a cat", "documents": ["a train", "a kitten"], "top_n": 1},
    ),
    Endpoint("/v1/models", "get", "The served models", None, openai.ModelList),
    Endpoint("/v1/models/{id}", "get", "One model", None, openai.ModelCard),
    Endpoint(
        *("/tokenize", "post", "Text or messages to token ids", openai.TokenizeRequest, openai.TokenizeResponse),
        example={"text": "Hello there"},
    ),
    Endpoint(
        *("/detokenize", "post", "Token ids to text", openai.DetokenizeRequest, openai.DetokenizeResponse),
        example={"tokens": [40, 50, 60]},
    ),
    Endpoint("/v1/requests/{id}/explain", "get", "Why a request waited, and what it cost"),
    Endpoint(
        *("/v1/cache/lookup", "post", "What the prefix cache has of a prompt"),
        *(openai.CacheLookupRequest, openai.CacheLookupResponse),
        example={"prompt": "Once upon a time"},
    ),
    Endpoint("/v1/usage", "get", "What your requests have used since the server started"),
    Endpoint("/health", "get", "Whether the server and its engine are alive"),
    Endpoint("/ready", "get", "Whether requests are taken"),
    Endpoint("/version", "get", "The version, and what computes"),
    Endpoint("/metrics", "get", "Numbers for Prometheus", media="text/plain"),
    Endpoint("/openapi.json", "get", "This description"),
    Endpoint("/", "get", "What runs, as a page", media="text/html"),
    Endpoint("/docs", "get", "The API, as a page that can send requests", media="text/html"),
)
_STATUSES = {
    "400": "The request is at fault; `param` names the field",
    "401": "No valid API key",
    "404": "No such model or path",
    "413": "The body is too large",
    "429": "Its objective is infeasible; nothing was computed",
    "500": "This request failed inside the engine",
    "503": "Loading, shutting down, overloaded, or the engine is gone",
}


def document(version: str, model: str = DEFAULT_MODEL) -> bytes:
    """The document as JSON; `model` is the one in examples."""
    kinds = [kind for each in ENDPOINTS for kind in (each.asked, each.answered) if kind is not None]
    _, components = msgspec.json.schema_components(
        [*kinds, openai.ChatUsageChunk, openai.ErrorResponse], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.verb] = _operation(each, model)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "headway", "version": version, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def _operation(endpoint: Endpoint, model: str) -> dict[str, Any]:
    answered = {"schema": _ref(endpoint.answered)} if endpoint.answered is not None else {}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": {endpoint.media: answered}}}
    if _streams(endpoint.asked):
        responses["200"]["content"]["text/event-stream"] = {}  # with "stream": true
    for status, text in _STATUSES.items():
        responses[status] = {"description": text, "content": {_JSON: {"schema": _ref(openai.ErrorResponse)}}}
    result: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.asked is not None:
        content = {"schema": _ref(endpoint.asked), "example": endpoint.example}
        result["requestBody"] = {"required": True, "content": {_JSON: content}}
    if "{id}" in endpoint.path:
        told = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        result["parameters"] = [{**told, "example": model}]
    return result


def _streams(asked: Any) -> bool:
    return asked is not None and issubclass(asked, openai.SamplingRequest)


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
