"""`headway serve`: start the engine process, put the server in front of it, run until a signal.

Kept light on purpose: the engine process is started before this process imports its own web stack, so that the
slower of the two begins at once.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence

from headway.config import ServeConfig
from headway.engine.process import CHILD, ProcessClient
from headway.errors import ConfigError, EngineDead

LOG_FORMAT = "%(asctime)s %(levelname)s server %(name)s: %(message)s"


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
    logging.basicConfig(level=config.server.log_level.upper(), format=LOG_FORMAT)
    client = ProcessClient.start(config.engine, command=command, log_level=config.server.log_level)
    # Imported only now: the engine process is already at work meanwhile.
    from headway.serve.server import serve_until_told

    try:
        serve_until_told(config, client, on_ready or announce, reread)
    except ConfigError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    except EngineDead as error:
        print(f"headway: {error}", file=sys.stderr)
        return 1
    return 0


def announce(url: str, model: str) -> None:
    """Print the server's address and a curl command that works as pasted."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    data = json.dumps({**body, "temperature": 0, "max_tokens": 64})
    print(f"headway serves {model} at {url}\nTry it:\n  {curl(url, data)}", flush=True)


def curl(url: str, data: str) -> str:
    """A command line for a shell."""
    quoted = data.replace("'", "'\\''")
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"
