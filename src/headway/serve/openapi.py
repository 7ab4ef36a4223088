"""The OpenAPI document, assembled from the very structs that requests are decoded to."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.serve import openai

_JSON = "application/json"
# Path, verb, what it does, request struct, response struct. None: no body, or not JSON.
_ENDPOINTS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/chat/completions", "post", "Answer a conversation", openai.ChatRequest, openai.ChatResponse),
    ("/v1/completions", "post", "Continue a text", openai.CompletionRequest, openai.CompletionUsageChunk),
    ("/v1/models", "get", "The served model", None, openai.ModelList),
    ("/v1/models/{id}", "get", "One model", None, openai.ModelCard),
    ("/tokenize", "post", "Text or messages to token ids", openai.TokenizeRequest, openai.TokenizeResponse),
    ("/detokenize", "post", "Token ids to text", openai.DetokenizeRequest, openai.DetokenizeResponse),
    ("/health", "get", "Whether the server and its engine are alive", None, None),
    ("/ready", "get", "Whether requests are taken", None, None),
    ("/version", "get", "The version", None, None),
    ("/metrics", "get", "Numbers for Prometheus", None, None),
    ("/", "get", "What runs, as a page", None, None),
    ("/docs", "get", "This list, as a page", None, None),
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


def document(version: str) -> bytes:
    """The document as JSON."""
    kinds = [kind for entry in _ENDPOINTS for kind in entry[3:] if kind is not None]
    _, components = msgspec.json.schema_components(
        [*kinds, openai.ChatUsageChunk, openai.ErrorResponse], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for path, verb, summary, asked, answered in _ENDPOINTS:
        paths.setdefault(path, {})[verb] = _operation(path, summary, asked, answered)
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


def _operation(path: str, summary: str, asked: Any, answered: Any) -> dict[str, Any]:
    content = {"content": {_JSON: {"schema": _ref(answered)}}} if answered is not None else {}
    responses: dict[str, Any] = {"200": {"description": "OK", **content}}
    for status, text in _STATUSES.items():
        responses[status] = {"description": text, "content": {_JSON: {"schema": _ref(openai.ErrorResponse)}}}
    result: dict[str, Any] = {"summary": summary, "responses": responses}
    if asked is not None:
        result["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(asked)}}}
    if "{id}" in path:
        result["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return result


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
