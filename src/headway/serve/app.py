"""The ASGI application: routes, authentication, request ids, and the one place where errors become responses.

Pure ASGI all the way, so that a client's disconnect reaches the handlers. It is built around a `Service`;
`run` starts the engine and opens the service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serve.access import AccessLog
from headway.serve.body import IGNORED, ClientGone
from headway.serve.hosts import is_allowed_host, names_of_machine
from headway.serve.keys import Tenant
from headway.serve.problem import Problem, new_name, problem_of
from headway.serve.routes import REQUEST_ID, Routes
from headway.serve.service import Service
from headway.serve.tenants import TENANT, VISIT

_MAX_PATH_CHARS = 128
_MIN_LIKENESS = 0.75
# Paths of other interfaces for which one of ours does the same.
_OTHER_INTERFACES = {"/v1/responses": "/v1/chat/completions", "/v1/messages": "/v1/chat/completions"}
# A browser cannot send a key for a page; /docs holds nothing of this server and sends the key that is entered there.
PROBES = frozenset({"/health", "/ready"})
OPEN_PATHS = PROBES | {"/docs"}
RATE_HEADERS = [
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
_UNFIT = re.compile(r"[^A-Za-z0-9_.\[\] -]")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def create_app(service: Service) -> ASGIApp:
    """Everything a server needs to answer for `service`."""
    # A router without Starlette's application around it, whose error pages are not ours. A trailing slash is
    # another path, not a redirect that drops the body.
    router = Router(Routes(service).table(), redirect_slashes=False)
    hosts = names_of_machine(service.config.host) | frozenset(service.config.hosts)
    app: ASGIApp = Envelope(router, service.tenants.identify, hosts)
    if service.config.cors_origins:
        # Around the key: a browser's preflight request carries none.
        app = CORSMiddleware(
            app,
            allow_origins=service.config.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-headway-ignored", "retry-after", "retry-after-ms", *RATE_HEADERS],
        )
    return AccessLog(app, service.tracing)


class Envelope:
    """Around every request: a request id on the answer, key and Host checked first, failures as error objects."""

    def __init__(
        self,
        app: Router,
        identify: Callable[[Mapping[bytes, bytes]], Tenant | None] | None = None,
        hosts: frozenset[str] = frozenset("*"),
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._routes = [route for route in app.routes if isinstance(route, Route)]
        self._identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        asked_id = headers.get(b"x-request-id", b"")
        request_id = asked_id if _SANE_ID.fullmatch(asked_id) else f"req-{new_name()}".encode()
        scope[REQUEST_ID] = request_id.decode()
        is_begun = False

        async def send_named(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if ignored := scope.get(IGNORED):
                    message["headers"].append((b"x-headway-ignored", _header(ignored)))
                if VISIT in scope:
                    message["headers"] += scope[VISIT].headers()
            await send(message)

        scope["app"] = self  # makes the router raise for unknown paths and methods instead of answering in plain text
        try:
            if self._identify is not None and scope["path"] not in OPEN_PATHS:
                # The path as routed, never one derived from the Host header.
                scope[TENANT] = self._identify(headers)
            self._require_host(scope["path"], headers)
            await self._app(scope, receive, send_named)
        except ClientGone:
            return
        except Exception as error:
            problem = problem_of(_known(error, scope, self._routes))
            if is_begun:
                raise
            _forget_frames(error)
            await problem.response()(scope, receive, send_named)

    def _require_host(self, path: str, headers: dict[bytes, bytes]) -> None:
        if path in PROBES:  # probes come by any name, and learn nothing
            return
        host = headers.get(b"host")
        asked = None if host is None else host.decode("latin-1")
        if not is_allowed_host(asked, self._hosts):
            message = (
                f"this server does not go by the name {(asked or '')[:64]!r}; call it by an address or by localhost, "
                "or start it with --allowed-hosts NAME"
            )
            raise Problem(403, message, type="permission_error", code="host_not_allowed")


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks: futures keep the error, and its frames keep them and the body, until garbage is collected.

    Bodies of 8 MB would add up to hundreds until then.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _header(names: list[str]) -> bytes:
    """Names out of a request's body, as a header may have them."""
    return ", ".join(_UNFIT.sub("_", name) for name in names).encode()


def _known(error: Exception, scope: Scope, routes: Sequence[Route]) -> Exception:
    """The router's own refusals, in our words."""
    if not isinstance(error, HTTPException):
        return error
    path = repr(scope["path"][:_MAX_PATH_CHARS])
    if error.status_code == 404:
        nearest = _nearest(scope["path"], routes)
        hint = "" if nearest is None else f"the nearest is {nearest}; "
        message = f"there is no path {path}; {hint}GET /openapi.json lists what there is"
        return Problem(404, message, code="unknown_path")
    headers = dict(error.headers or {})
    allowed = sorted({method for route in routes if route.path == scope["path"] for method in route.methods or ()})
    headers["allow"] = ", ".join(method for method in allowed if method != "HEAD") or headers.get("Allow", "")
    message = f"{scope['method']} is not allowed for {path}; allowed: {headers['allow']}"
    return Problem(error.status_code, message, code="bad_method", headers={"allow": headers["allow"]})


def _nearest(path: str, routes: Sequence[Route]) -> str | None:
    """The route whose path looks most like this one, with its method."""
    by_path = {route.path: route for route in routes if "{" not in route.path}
    inside = [known for known in by_path if known.endswith(path.rstrip("/")) and len(path) > 1]
    path = _OTHER_INTERFACES.get(path, path[:_MAX_PATH_CHARS])
    close = inside or get_close_matches(path, by_path, n=1, cutoff=_MIN_LIKENESS)
    if not close:
        return None
    methods = sorted((by_path[close[0]].methods or set()) - {"HEAD"})
    return f"{methods[0]} {close[0]}"
