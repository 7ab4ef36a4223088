"""What the official client makes of each error: which exception, how many attempts, and how long it waits between them.

Real HTTP and the real client; only its sleep is replaced by a note of the seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from echo_engine import EchoEngine
from headway.engine.client import Output, Submit
from headway.errors import Overloaded, Unreachable
from headway.values.plan import Emission
from serve_harness import Harness, serving

ASK: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
RETRIES = 2  # what the client does by default


class Refusing(EchoEngine):
    """Refuses every request with one error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def add(self, submit: Submit) -> None:
        raise self._error


class Breaking(EchoEngine):
    """Every request stops after `num_tokens` tokens and fails inside the engine once it may."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(hold_after=num_tokens)
        self._num_tokens = num_tokens
        self.may_fail = threading.Event()
        if not num_tokens:
            self.may_fail.set()

    def step(self) -> Emission[Output]:
        for id, row in list(self._running.items()):
            if len(row.tokens) >= self._num_tokens and self.may_fail.is_set():
                del self._running[id]
                return Emission([], [], [Output(id, finish="error", error="a tensor is not finite")], {})
        return super().step()


class Seen:
    """What the client did."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.waits: list[float] = []


@contextmanager
def client(server: Harness, monkeypatch: pytest.MonkeyPatch, key: str = "any") -> Iterator[tuple[openai.OpenAI, Seen]]:
    seen = Seen()
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**{**vars(time), "sleep": seen.waits.append}))
    with (
        httpx2.Client(event_hooks={"response": [lambda response: seen.statuses.append(response.status_code)]}) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=http) as made,
    ):
        yield made, seen


def chat(made: openai.OpenAI, **fields: Any) -> object:
    return made.chat.completions.create(**{**ASK, **fields})


FAULTS: dict[str, tuple[type[openai.APIStatusError], int, str | None, Callable[[openai.OpenAI], object]]] = {
    "400": (openai.BadRequestError, 400, None, lambda made: chat(made, temperature=3)),
    "400 context": (openai.BadRequestError, 400, "context_length_exceeded", lambda made: chat(made, max_tokens=10_000)),
    "403 host": (
        openai.PermissionDeniedError,
        403,
        "host_not_allowed",
        lambda made: chat(made, extra_headers={"host": "evil.example"}),
    ),
    "404 model": (openai.NotFoundError, 404, "model_not_found", lambda made: chat(made, model="gpt-4")),
    "404 path": (openai.NotFoundError, 404, "unknown_path", lambda made: made.moderations.create(model="m", input="x")),
    "413": (openai.APIStatusError, 413, "body_too_large", lambda made: chat(made, user="x" * 300_000)),
    "415": (
        openai.APIStatusError,
        415,
        "unsupported_content_type",
        lambda made: chat(made, extra_headers={"content-type": "text/plain"}),
    ),
    "431": (openai.APIStatusError, 431, "head_too_large", lambda made: chat(made, extra_headers={"x-a": "b" * 40_000})),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_client_is_told_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, status, code, send = FAULTS[name]
    with (
        serving(max_body_bytes=256 * 1024) as server,
        client(server, monkeypatch) as (made, seen),
        pytest.raises(kind) as caught,
    ):
        send(made)
    assert type(caught.value) is kind
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (
        status,
        code,
        "permission_error" if status == 403 else "invalid_request_error",
    )
    assert caught.value.request_id
    assert (seen.statuses, seen.waits) == ([status], [])


def test_a_wrong_key_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(api_key="k") as server,
        client(server, monkeypatch, "wrong") as (made, seen),
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        chat(made)
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
    assert (seen.statuses, seen.waits) == ([401], [])


def test_a_tenant_over_its_rate_waits_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.ann]\nkeys = ["sk-ann"]\nrequests_per_minute = 1\n')
    keys.chmod(0o600)
    with serving(keys=str(keys)) as server, client(server, monkeypatch, "sk-ann") as (made, seen):
        chat(made)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(made)
    assert (caught.value.type, caught.value.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert caught.value.response.headers["x-ratelimit-limit-requests"] == "1"
    assert seen.statuses == [200, 429, 429, 429]
    assert all(30 <= wait <= 60 for wait in seen.waits)


@pytest.mark.parametrize(
    ("make", "kind", "status", "type_", "code", "least_s", "most_s"),
    [
        (
            lambda: serving(Refusing(Overloaded("full", retry_after_s=9.0))),
            openai.InternalServerError,
            503,
            "service_unavailable_error",
            "server_is_overloaded",
            1,
            60,
        ),
        (
            lambda: serving(Refusing(Unreachable("late", retry_after_s=7.0))),
            openai.RateLimitError,
            429,
            "rate_limit_error",
            "deadline_unreachable",
            7,
            7,
        ),
        (
            lambda: serving(is_open=False),
            openai.InternalServerError,
            503,
            "service_unavailable_error",
            "not_ready",
            2,
            2,
        ),
    ],
    ids=["overloaded", "late", "loading"],
)
def test_a_server_that_cannot_now_is_asked_again_when_it_says(
    make: Callable[[], Any],
    kind: type[openai.APIStatusError],
    status: int,
    type_: str,
    code: str,
    least_s: float,
    most_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make() as server, client(server, monkeypatch) as (made, seen), pytest.raises(kind) as caught:
        chat(made)
    assert (caught.value.type, caught.value.code) == (type_, code)
    assert seen.statuses == [status] * (1 + RETRIES)
    assert len(seen.waits) == RETRIES
    assert all(least_s <= wait <= most_s for wait in seen.waits)
    assert all(wait == float(caught.value.response.headers["retry-after"]) or wait >= 1 for wait in seen.waits)


def test_a_server_that_shuts_down_sends_clients_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server, client(server, monkeypatch) as (made, seen):
        server.service.begin_drain()
        with pytest.raises(openai.InternalServerError) as caught:
            chat(made)
    assert (caught.value.status_code, caught.value.response.headers["connection"]) == (503, "close")
    assert seen.waits == [2.0, 2.0]


def test_a_request_that_fails_inside_the_engine_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(Breaking(0)) as server,
        client(server, monkeypatch) as (made, seen),
        pytest.raises(openai.InternalServerError) as caught,
    ):
        chat(made)
    assert (caught.value.status_code, caught.value.type) == (500, "server_error")
    assert (seen.statuses, seen.waits) == ([500], [])


def test_a_failure_in_a_stream_that_has_begun_is_an_error_and_no_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    engine = Breaking(2)

    def read(made: openai.OpenAI) -> None:
        for chunk in chat(made, stream=True, temperature=0):  # type: ignore[attr-defined]
            texts.append(chunk.choices[0].delta.content or "")
            if "".join(texts) == "us":
                engine.may_fail.set()

    with (
        serving(engine) as server,
        client(server, monkeypatch) as (made, seen),
        pytest.raises(openai.APIError) as caught,
    ):
        read(made)
    assert type(caught.value) is openai.APIError
    assert caught.value.type == "server_error"
    assert "".join(texts) == "us"
    assert (seen.statuses, seen.waits) == ([200], [])


def test_a_connection_beyond_the_limit_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_connections=1, max_connections_per_ip=1) as server, httpx2.Client(base_url=server.url) as other:
        assert other.get("/health").status_code == 200  # and keeps its connection
        with client(server, monkeypatch) as (made, seen), pytest.raises(openai.InternalServerError) as caught:
            chat(made)
    assert caught.value.code == "too_many_connections"
    assert (seen.statuses, seen.waits) == ([503] * 3, [2.0] * 2)
