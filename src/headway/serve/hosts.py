"""Which names a client may call the server by.

A page of any site can have its own name resolve to this machine and so send requests that a browser takes for ones to
that site (DNS rebinding). Such a request has the site's name as its Host. An address cannot be rebound, so that every
address is allowed; of names, those of this machine and those that were configured.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]/?#@\s]+)(?::\d{1,5})?", re.IGNORECASE)


def names_of_machine(host: str) -> frozenset[str]:
    """The names of this machine, and the one it was told to listen on."""
    own = socket.gethostname().lower()
    names = {"localhost", own, own.partition(".")[0], f"{own.partition('.')[0]}.local", host.lower()}
    return frozenset(names - {""})


def is_allowed_host(header: str | None, names: Collection[str]) -> bool:
    """Whether a request with this Host may be answered; without one, as HTTP/1.0 has it, no browser sent it."""
    if header is None or "*" in names:
        return True
    found = _HOST.fullmatch(header.strip())
    if found is None:
        return False
    name = found["name"].lower().rstrip(".")
    if name in names or name.endswith(".localhost"):
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
