"""Two tenants with a key each, and what they ask a test server."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_harness import Harness

ANN, BOB = "sk-ann-0123456789", "sk-bob-0123456789"


def keys_file(path: Path, text: str = "") -> Path:
    file = path / "keys.toml"
    file.write_text(text or f'[tenants.ann]\nkeys = ["{ANN}"]\n[tenants.bob]\nkeys = ["{BOB}"]\n')
    file.chmod(0o600)
    return file


def ask(server: Harness, key: str, **body: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers by lower-case name, and body of a small completion."""
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, **body}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, json.loads(raw)


def get(server: Harness, path: str) -> int:
    """The status without a key."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
