"""The admin endpoint: what is in force, and changing it while requests run. A unix socket of its own, off by default.

    curl --unix-socket PATH http://admin/config
    curl --unix-socket PATH http://admin/config -X PATCH -d '{"target_itl_ms": 40}'
    curl --unix-socket PATH http://admin/replicas
    curl --unix-socket PATH http://admin/restart -X POST
    curl --unix-socket PATH http://admin/replicas/NAME/drain -X POST

There is no other authentication: the file of the socket belongs to the server's user alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from headway.cluster.client import FleetClient
from headway.engine.client import Settings
from headway.errors import ConfigError, RequestError
from headway.serve.adapters import operator_routes
from headway.serve.app import Envelope
from headway.serve.body import read_body
from headway.serve.protocol import http_config
from headway.serve.service import Service

_MAX_BODY_BYTES = 64 * 1024


def create_admin(service: Service, fleet: FleetClient | None = None) -> ASGIApp:
    """The routes, with errors as the API has them; those of a fleet only if there is one."""

    async def show(request: Request) -> Response:
        return _json(await service.model().client.reconfigure({}))

    async def change(request: Request) -> Response:
        changes = _decode(await read_body(request, _MAX_BODY_BYTES, any_type=True))
        try:
            return _json(await service.model().client.reconfigure(changes))
        except ConfigError as error:
            raise RequestError(f"nothing was changed: {error}", code="invalid_value") from error

    async def replicas(request: Request) -> Response:
        assert fleet is not None
        return _json(fleet.table())

    async def restart(request: Request) -> Response:
        """Returns when every replica has another process, unless one such is under way."""
        assert fleet is not None
        if restarting.locked():
            raise RequestError("a restart is under way; wait for its end: GET /replicas shows it", code="conflict")
        async with restarting:
            await fleet.restart()
        return _json(fleet.table())

    async def drain(request: Request) -> Response:
        """Returns when the replica is removed: what it has is done by then, or goes on elsewhere."""
        assert fleet is not None
        await fleet.drain(request.path_params["name"])
        return _json(fleet.table())

    restarting = asyncio.Lock()
    routes = [Route("/config", show, methods=["GET"]), Route("/config", change, methods=["PATCH"])]
    if fleet is not None:
        routes += [Route("/replicas", replicas, methods=["GET"]), Route("/restart", restart, methods=["POST"])]
        routes.append(Route("/replicas/{name}/drain", drain, methods=["POST"]))
        routes += operator_routes(service, fleet)
    return Envelope(Router(routes, redirect_slashes=False))


class AdminServer(uvicorn.Server):
    """Beside the main server, which alone listens to signals."""

    def __init__(self, service: Service, fleet: FleetClient | None = None) -> None:
        super().__init__(http_config(create_admin(service, fleet)))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def admin_listener(path: str) -> Iterator[socket.socket]:
    """A listening unix socket that only this user can open; its file is gone afterwards."""
    file = Path(path).expanduser()
    _make_way(file)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            os.fchmod(listener.fileno(), 0o600)  # so that the file is never open to others, not even for a moment
            listener.bind(str(file))
            file.chmod(0o600)
            listener.listen(16)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot make the admin socket {path}: {reason}; choose another path") from None
        try:
            yield listener
        finally:
            file.unlink(missing_ok=True)


def _make_way(file: Path) -> None:
    """Remove a socket without a listener, which a killed server leaves behind."""
    try:
        is_socket = stat.S_ISSOCK(file.lstat().st_mode)
    except OSError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(file)) != 0:
                file.unlink(missing_ok=True)
                return
    what = "another server listens there" if is_socket else "there is a file of that name"
    raise ConfigError(f"cannot make the admin socket {file}: {what}; choose another path")


def _decode(body: bytes) -> Settings:
    try:
        changes = msgspec.json.decode(body, type=Settings)
        msgspec.msgpack.encode(changes)  # as it will travel to the engine: a number has 64 bits there
        return changes
    except OverflowError as error:
        raise RequestError(f"nothing was changed: {error}; allowed: 64 bits", code="invalid_value") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        what = f"the body is not an object of settings: {error}"
        raise RequestError(f'{what}; send one such as {{"target_itl_ms": 40}}', code="invalid_json") from error


def _json(value: Settings | list[dict[str, object]]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
