"""What a server tells about requests it has: why one waited, what the cache has of a prompt, what a tenant has used.

Everything is the caller's own: requests, cached prompts and sums of other API keys do not exist here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from typing import TypeVar

import msgspec
from starlette.responses import Response

from headway.engine.client import Submit
from headway.engine.explain import Explanation
from headway.serve import explain
from headway.serve.openai import CacheLookupResponse
from headway.serve.problem import Problem, not_ready
from headway.serve.service import ServedModel, Service

T = TypeVar("T")

MOST_ANSWERS = 64  # of one request that are explained: the engine's time for it is other requests' time
_PATIENCE_S = 5.0  # for an engine that is in a step, or has to answer others first
_FIELDS = [field.name for field in fields(Explanation) if field.name != "id"]


async def explanation(service: Service, name: str, owner: str) -> Response:
    """Why a request waited, by the id of its response or its request id; 404 if it is another's or too old."""
    served, model = service.history.find(name, owner), service.model_or_none
    found: list[tuple[int, Explanation]] = []
    if served is not None and model is not None:
        client, ids = model.client, served.ids[:MOST_ANSWERS]
        asked = await patiently(service, lambda: asyncio.gather(*map(client.explain, ids)))
        found = [(at, told) for at, told in enumerate(asked) if told is not None]
    if served is None or not found:
        message = (
            f"there is no request {name[:64]!r} of this API key among the last ones; give the id of a response or the "
            "value of its header x-request-id"
        )
        raise Problem(404, message, param="id", code="request_not_found")
    answers = [
        {"index": index, "words": explain.words(told), **{name: getattr(told, name) for name in _FIELDS}}
        for index, told in found
    ]
    said = {
        "id": served.name, "object": "request.explanation", "num_answers": len(served.ids), "answers": answers
    }  # fmt: skip
    return Response(msgspec.json.encode(said), media_type="application/json")


async def cache_lookup(service: Service, model: ServedModel, submit: Submit) -> Response:
    """How much of a prompt is in the prefix cache, for its sender."""
    hit = await patiently(service, lambda: model.client.look_up(submit))
    predicted = None if hit.predicted_ttft_s is None else round(1e3 * hit.predicted_ttft_s, 3)
    said = CacheLookupResponse(hit.num_prompt, hit.num_cached, predicted)
    return Response(msgspec.json.encode(said), media_type="application/json")


def usage(service: Service, owner: str) -> Response:
    """What the requests of this API key have used since the server started."""
    said = {"object": "usage", **asdict(service.history.usage(owner))}
    return Response(msgspec.json.encode(said), media_type="application/json")


async def patiently(service: Service, ask: Callable[[], Awaitable[T]]) -> T:
    """What the engine answers; it has one question at a time, so that those who ask much do not hold up its steps."""
    try:
        async with asyncio.timeout(_PATIENCE_S), service.questions:
            return await ask()
    except TimeoutError:
        raise not_ready("the engine did not answer in time") from None
