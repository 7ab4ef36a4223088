"""`headway fleet`: the replicas of a running server as a table, from its admin socket."""

from __future__ import annotations

import json as jsonlib
import socket
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headway.cli.args import Switch
from headway.errors import ConfigError, EngineDead

EXAMPLES = """Examples:
  headway fleet --admin-socket /run/headway.sock
  headway fleet --admin-socket /run/headway.sock --json | jq '.[].name'
  headway fleet --admin-socket /run/headway.sock --drain gpu-3"""

_ASK_S, _DRAIN_S = 10.0, 600.0
_WIDEST = 10_000
_COLORS = {"up": "green", "draining": "yellow", "starting": "yellow", "probing": "yellow"}


def fleet(*, admin_socket: str, drain: str | None = None, json: Switch = False) -> int:
    """Show the replicas of a running server: where they are, load, cache, health, restarts.

    Parameters
    ----------
    admin_socket
        The path that the server was given with --admin-socket.
    drain
        Remove this replica first: it gets no new requests and ends when what it has is done.
    json
        Print one JSON array.
    """
    rows = ask(admin_socket, "GET", "/replicas") if drain is None else _drain(admin_socket, drain)
    if json:
        print(jsonlib.dumps(rows))
        return 0
    Console(width=_WIDEST).print(table(rows))  # as wide as it is: a terminal breaks long lines, and nothing is cut
    return 0


def table(rows: Sequence[Mapping[str, object]]) -> Table:
    made = Table(box=None, pad_edge=False)
    for title in ("name", "where", "role", "health", "requests", "prefill tokens", "cached blocks", "restarts", "pid"):
        made.add_column(title, justify="left" if title in ("name", "where", "role", "health") else "right")
    for row in rows:
        health = str(row["health"])
        made.add_row(
            str(row["name"]),
            str(row["where"]),
            str(row["role"]),
            f"[{_COLORS.get(health, 'red')}]{health}[/]",
            str(row["requests"]),
            str(row["prefill_tokens"]),
            f"{row['cached_blocks']} of {row['num_blocks']}",
            str(row["restarts"]),
            str(row["pid"] or "-"),
        )
    return made


def _drain(path: str, name: str) -> list[dict[str, object]]:
    from urllib.parse import quote

    return ask(path, "POST", f"/replicas/{quote(name, safe='')}/drain", timeout_s=_DRAIN_S)


def ask(path: str, method: str, url: str, *, timeout_s: float = _ASK_S) -> list[dict[str, object]]:
    """One question over a unix socket; ConfigError if no server listens there or it refuses."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request(method, url, headers={"Host": "admin"})
        reply = connection.getresponse()
        said = jsonlib.loads(reply.read())
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot ask the server at {path}: {reason}; does one listen there?") from None
    except (HTTPException, ValueError) as error:
        raise EngineDead(f"the server at {path} gave no answer that is understood: {error}") from None
    finally:
        connection.close()
    if reply.status != 200:
        raise ConfigError(str(said.get("error", {}).get("message", said)))
    found: list[dict[str, object]] = said
    return found


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("admin", timeout=timeout_s)
        self._path = str(Path(path).expanduser())

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
