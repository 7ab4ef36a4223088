"""What a server tells about requests it has: why one waited, what the cache has of a prompt, what a tenant has used.

Everything is the caller's own: requests, cached prompts and sums of other API keys do not exist here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict
from typing import TypeVar

import msgspec
from starlette.responses import Response

from headway.engine.client import Submit
from headway.serve import explain
from headway.serve.openai import CacheLookupResponse
from headway.serve.problem import Problem, not_ready
from headway.serve.service import ServedModel, Service

T = TypeVar("T")

_PATIENCE_S = 5.0  # for an engine that is in a step


async def explanation(service: Service, name: str, owner: str) -> Response:
    """Why a request waited, by the id of its response or its request id; 404 if it is another's or too old."""
    served, model = service.history.find(name, owner), service.model_or_none
    found = []
    if served is not None and model is not None:
        asked = await asyncio.gather(*(patiently(model.client.explain(id)) for id in served.ids))
        found = [told for told in asked if told is not None]
    if served is None or not found:
        message = (
            f"there is no request {name[:64]!r} of this API key among the last ones; give the id of a response or the "
            "value of its header x-request-id"
        )
        raise Problem(404, message, param="id", code="request_not_found")
    answers = []
    for index, told in enumerate(found):
        fields = {field: value for field, value in asdict(told).items() if field != "id"}
        answers.append({"index": index, "words": explain.words(told), **fields})
    said = {"id": served.name, "object": "request.explanation", "answers": answers}
    return Response(msgspec.json.encode(said), media_type="application/json")


async def cache_lookup(model: ServedModel, submit: Submit) -> Response:
    """How much of a prompt is in the prefix cache, for its sender."""
    hit = await patiently(model.client.look_up(submit))
    predicted = None if hit.predicted_ttft_s is None else round(1e3 * hit.predicted_ttft_s, 3)
    said = CacheLookupResponse(hit.num_prompt, hit.num_cached, predicted)
    return Response(msgspec.json.encode(said), media_type="application/json")


def usage(service: Service, owner: str) -> Response:
    """What the requests of this API key have used since the server started."""
    said = {"object": "usage", **asdict(service.history.usage(owner))}
    return Response(msgspec.json.encode(said), media_type="application/json")


async def patiently(asked: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await asked
    except TimeoutError:
        raise not_ready("the engine did not answer in time") from None
