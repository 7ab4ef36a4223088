"""Adapters as clients and operators see them: names of models, and the routes that load and unload them.

    model: "base"  ·  "adapter"  ·  "base:adapter"

Loading reads a path of this machine, so it is the operator's alone: at the admin socket, never at the server's port.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.cluster.client import FleetClient
from headway.config_text import ADAPTER_NAME
from headway.errors import RequestError
from headway.serve.body import read_body
from headway.serve.service import ServedModel, Service

_MOST_PATH = 4096
_MOST_BODY_BYTES = 64 * 1024

T = TypeVar("T", bound=msgspec.Struct)


class LoadRequest(msgspec.Struct):
    """As vLLM has it; its other fields are not needed here."""

    lora_name: str
    lora_path: str


class UnloadRequest(msgspec.Struct):
    lora_name: str


def chosen(asked: str | None, model: ServedModel) -> ServedModel:
    """The model that a request names, or the adapter; no name means the model. Nothing else is there."""
    name, adapters = model.name, model.client.info.adapters
    if asked is None or asked == name:
        return model
    adapter = asked if asked in adapters else asked.removeprefix(f"{name}:")
    if adapter not in adapters:
        what = f"this server has {', '.join(map(repr, (name, *adapters)))}"
        raise RequestError(
            f"the model {asked[:128]!r} does not exist here; {what}", param="model", code="model_not_found"
        )
    return _with(model, adapter)


def adapted(model: ServedModel) -> list[ServedModel]:
    """The model with each of its adapters."""
    return [_with(model, adapter) for adapter in model.client.info.adapters]


def _with(model: ServedModel, adapter: str) -> ServedModel:
    one = copy.copy(model)  # with its texts of tokens, which are worth keeping
    object.__setattr__(one, "name", adapter)
    object.__setattr__(one, "adapter", adapter)
    return one


def require_sound(name: str, path: str, served: str) -> None:
    """What can be said of a load without looking at any file."""
    if ADAPTER_NAME.fullmatch(name) is None or name == served:
        allowed = "letters, digits, _, ., / and -, up to 128, and another name than the model's"
        raise RequestError(f"lora_name is {name!r:.150}; allowed: {allowed}", param="lora_name")
    if not path or len(path) > _MOST_PATH or "\0" in path:
        raise RequestError(f"lora_path takes 1 to {_MOST_PATH} characters, a directory here", param="lora_path")


async def _decode(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await read_body(request, _MOST_BODY_BYTES, any_type=True), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        shown = ", ".join(f'"{name}": "..."' for name in kind.__struct_fields__)
        raise RequestError(f"the body is at fault: {error}; send {{{shown}}}", code="invalid_json") from error


def _digests(fleet: FleetClient) -> Response:
    """What there is now."""
    return Response(msgspec.json.encode({"adapters": fleet.info.adapters}), media_type="application/json")


def operator_routes(service: Service, fleet: FleetClient) -> list[Route]:
    """Load and unload, with vLLM's paths and fields."""

    async def load(request: Request) -> Response:
        asked = await _decode(request, LoadRequest)
        model = service.model()
        require_sound(asked.lora_name, asked.lora_path, model.name)
        if asked.lora_name in model.client.info.adapters:
            what = f"the adapter {asked.lora_name!r} is loaded already; unload it first, or take another name"
            raise RequestError(what, param="lora_name", code="conflict")
        await fleet.load_adapter(asked.lora_name, asked.lora_path)
        return _digests(fleet)

    async def unload(request: Request) -> Response:
        asked = await _decode(request, UnloadRequest)
        service.model()
        await fleet.unload_adapter(asked.lora_name)
        return _digests(fleet)

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]
