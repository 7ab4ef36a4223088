"""`headway serve`: start the engine process, put the server in front of it, run until a signal.

Kept light on purpose: the engine process is started before this process imports its own web stack, so that the
slower of the two begins at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from types import FrameType

from headway import logs
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.routes._route import load_route
from headway.config import ServeConfig, ServerConfig
from headway.engine.process import CHILD
from headway.engine.supervision import Supervision
from headway.errors import ConfigError, EngineDead
from headway.serve.keys import read_keys, weighted
from headway.serve.ray_front import RayFront, for_ray, require_ray

log = logging.getLogger(__name__)


def run(
    config: ServeConfig,
    on_ready: Callable[[str, str], None] | None = None,
    *,
    command: Sequence[str] = CHILD,
    reread: Callable[[], ServeConfig] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. `on_ready(url, model)` is called once requests are taken.

    `reread` gives the configuration anew when SIGHUP comes.
    """
    _survive_terminal()
    signal.signal(signal.SIGTERM, _end_early)
    try:
        return _run(config, on_ready, command, reread)
    except _EndedEarly:
        log.info("SIGTERM: the server ends before it was up")
        return 0


class _EndedEarly(BaseException):
    """SIGTERM came before the server had its own way to end."""


def _end_early(number: int, frame: FrameType | None) -> None:
    raise _EndedEarly


def _run(
    config: ServeConfig,
    on_ready: Callable[[str, str], None] | None,
    command: Sequence[str],
    reread: Callable[[], ServeConfig] | None,
) -> int:
    level, form = config.server.log_level, config.server.log_format
    logs.set_up("server", level, form)
    engine = config.engine if config.server.keys is None else weighted(config.engine, read_keys(config.server.keys))
    rules = Supervision(resumes=config.server.resume, stall_s=config.server.stall_s)
    route = load_route(config.server.route)
    ray: RayFront | None = None
    server = config.server
    if config.ray.ray is not None:
        require_ray()
        server = for_ray(config.server)
        ray = RayFront(replace(config, engine=engine), server)
    client = FleetClient.start(
        *(engine,),
        num_replicas=server.replicas,
        route=route,
        gate=_gate(server),
        command=command,
        log_level=level,
        log_format=form,
        rules=rules,
    )
    # Imported only now: the engine process is already at work meanwhile.
    from headway.serve.server import serve_until_told

    try:
        serve_until_told(config, client, on_ready or partial(announce, server=config.server), reread, ray)
    except (ConfigError, EngineDead) as error:
        _tell_end(error, config.server)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _gate(server: ServerConfig) -> GateConfig | None:
    """Where engines join; they see the same certificate as clients."""
    if server.listen_engines is None:
        return None
    tls = None
    if server.tls_cert is not None:
        from headway.serve.tls import tls_context  # imports the web stack, which takes a while

        tls = tls_context(server.tls_cert, server.tls_key)
    gate = GateConfig.of(server.listen_engines, server.engine_key, server.engine_key_file, tls)
    return replace(gate, cert=server.tls_cert, cert_key=server.tls_key)


def _tell_end(error: Exception, server: ServerConfig) -> None:
    if server.log_format == "json":  # whatever reads stderr takes every line for an object
        log.error("%s", error)
        return
    for handler in logging.getLogger().handlers:
        handler.flush()  # these words come last
    print(f"headway: {error}", file=sys.stderr)


def _survive_terminal() -> None:
    """Neither a closed terminal nor closed standard streams end a server or its processes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which processes started from here inherit
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next socket would be the standard output of every process started from here
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)
    if sys.stderr is None:  # Python leaves out a stream that was closed
        sys.stderr = os.fdopen(2, "w")


def announce(url: str, model: str, server: ServerConfig) -> None:
    """Print the server's addresses; what cannot be printed, since nothing reads it any more, is left out."""
    try:
        _announce(url, model, server)
    except (OSError, ValueError) as error:
        log.info("serving at %s; its addresses could not be printed: %s", url, error)
        with contextlib.suppress(OSError, ValueError):
            # What is left in the buffer would fail again when Python ends, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _announce(url: str, model: str, server: ServerConfig) -> None:
    """The addresses and a curl command that works as pasted; a warning if it is open to a network."""
    print(f"headway serves {model} at {url}", flush=True)
    if not is_loopback(server.host):
        print(f"On this network: {lan_url(url, server.host)}", flush=True)
        if not server.asks_for_key:
            said = "it listens beyond this machine and asks for no key; every machine that reaches it can use it."
            what_to_do = "Set HEADWAY_API_KEY, or leave --host out."
            if server.log_format == "json":  # whatever reads stderr takes every line for an object
                log.warning("%s %s", said, what_to_do)
            else:
                print(f"headway: warning: {said} {what_to_do}", file=sys.stderr, flush=True)
    print(f"Try it:\n  {curl(url, model, has_key=server.asks_for_key)}", flush=True)
    print(f"In a browser: {url}/docs", flush=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or the empty one, which is every address
        return False


def lan_url(url: str, host: str) -> str:
    """Where others on the network reach a server that is at `url` on this machine."""
    if host not in ("0.0.0.0", "::", ""):
        return url
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses a route and sends nothing; the address is for documentation
            address = probe.getsockname()[0]
        except OSError:
            address = socket.gethostname()
    return f"{url.partition(':')[0]}://{address}:{url.rpartition(':')[2]}"


def curl(url: str, model: str, *, has_key: bool = False) -> str:
    """A command line for a shell that asks the model a question."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    data = json.dumps({**body, "max_tokens": 64}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $HEADWAY_API_KEY"' if has_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{data}'"
