"""`headway serve`: start the engine process, put the server in front of it, run until a signal.

Kept light on purpose: the engine process is started before this process imports its own web stack, so that the
slower of the two begins at once.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address

from headway import logs
from headway.config import ServeConfig, ServerConfig
from headway.engine.process import CHILD
from headway.engine.supervisor import SupervisedClient, Supervision
from headway.errors import ConfigError, EngineDead
from headway.serve.keys import read_keys, weighted

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
    level, form = config.server.log_level, config.server.log_format
    logs.set_up("server", level, form)
    engine = config.engine if config.server.keys is None else weighted(config.engine, read_keys(config.server.keys))
    rules = Supervision(resumes=config.server.resume, stall_s=config.server.stall_s)
    client = SupervisedClient.start(engine, command=command, log_level=level, log_format=form, rules=rules)
    # Imported only now: the engine process is already at work meanwhile.
    from headway.serve.server import serve_until_told

    try:
        serve_until_told(config, client, on_ready or partial(announce, server=config.server), reread)
    except ConfigError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    except EngineDead as error:
        print(f"headway: {error}", file=sys.stderr)
        return 1
    return 0


def announce(url: str, model: str, server: ServerConfig) -> None:
    """Print the server's addresses and a curl command that works as pasted; warn if it is open to a network."""
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
    return f"http://{address}:{url.rpartition(':')[2]}"


def curl(url: str, model: str, *, has_key: bool = False) -> str:
    """A command line for a shell that asks the model a question."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    data = json.dumps({**body, "max_tokens": 64}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $HEADWAY_API_KEY"' if has_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{data}'"
