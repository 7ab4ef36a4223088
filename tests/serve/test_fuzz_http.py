"""A few hundred broken and random bodies; `tools/fuzz_http.py` sends 20,000."""

from __future__ import annotations

import json
from email.message import Message

import pytest

import fuzz_http
from serve_harness import serving


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_a_body_holds_the_answer_is_sound(seed: int) -> None:
    with serving() as server:
        statuses, faults = fuzz_http.run(server.url, 400, seed)
        server.wait_idle()
    assert faults == []
    assert sum(statuses.values()) == 400
    assert statuses[200] > 20
    assert statuses[400] > 100


def test_what_is_wrong_is_found() -> None:
    def judged(body: bytes, status: int, answer: bytes, **headers: str) -> str | None:
        told = Message()
        for name, value in headers.items():
            told[name.replace("_", "-")] = value
        return fuzz_http.fault(body, status, told, answer)  # type: ignore[arg-type]

    def error(message: str) -> bytes:
        return json.dumps({"error": {"message": message, "type": "t", "param": None, "code": None}}).encode()

    assert judged(b"{}", 200, b"") is None
    assert judged(b"{", 200, b"") == "a body that is no JSON was accepted"
    assert judged(b'{"a": NaN}', 200, b"") == "a body that is no JSON was accepted"
    assert judged(b"{", 400, error("no")) is None
    assert judged(b"{", 400, b"no") == "the answer is no error object"
    assert judged(b"{", 400, b'{"error": {}}') == "the error object has other fields"
    assert judged(b"{", 400, error("<object at 0x7f0000000000>")) == "it tells too much"
    assert judged(b"{", 500, error("no")) == "500"
    assert judged(b"{", 503, error("no")) == "503"
    assert judged(b"{", 503, error("no"), retry_after="1") is None
