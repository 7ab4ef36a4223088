"""Talking to a running server over the OpenAI wire with the standard library alone. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from headway.errors import ConfigError, EngineError


class Remote:
    """One server. Every call is its own connection, so an answer given up half-way is aborted by the server."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}; allowed: http://host:port or https://host")
        try:
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"url is {url!r}; its port must be 0 to 65535") from error
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host = parts.hostname
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        self._timeout_s = timeout_s
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """The names of the models the server offers, at least one."""
        connection = self._connect()
        try:
            data = self._decode(self._call(connection, "GET", "/v1/models", None).read())
            names = [str(model["id"]) for model in data["data"]]
        except (LookupError, TypeError):
            names = []
        finally:
            connection.close()
        if not names:
            raise EngineError(f"{self.url} offers no model; is it an OpenAI-compatible server?")
        return names

    def metrics(self) -> str:
        """The server's numbers in Prometheus' text format."""
        connection = self._connect()
        try:
            return self._call(connection, "GET", "/metrics", None).read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            raise EngineError(f"lost {self.url} while it was read: {error}") from error
        finally:
            connection.close()

    def stream(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> Generator[str, None, int | None]:
        """The answer to `messages` as it is written; returns its number of tokens, None if the server does not say."""
        connection = self._connect()
        try:
            body = {**options, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
            response = self._call(connection, "POST", "/v1/chat/completions", body)
            return (yield from self._deltas(response))
        except (OSError, HTTPException) as error:
            raise EngineError(f"lost {self.url} in the middle of an answer: {error}") from error
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        return self._kind(self._host, self._port, timeout=self._timeout_s)

    def _call(self, connection: HTTPConnection, method: str, path: str, body: object) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise EngineError(f"cannot reach {self.url}: {error}; start a server with: headway serve") from error
        if response.status != 200:
            raise EngineError(f"{self.url} answered {response.status}: {self._fault(response.read(65536))}")
        return response

    def _deltas(self, response: HTTPResponse) -> Generator[str, None, int | None]:
        num_tokens: int | None = None
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return num_tokens
            event = self._decode(data)
            if "error" in event:
                raise EngineError(f"{self.url} failed: {event['error'].get('message', event['error'])}")
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""
        raise EngineError(f"{self.url} closed the connection before the answer was complete")

    def _decode(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise EngineError(f"{self.url} sent something that is not JSON: {data[:80]!r}") from error

    def _fault(self, body: bytes) -> str:
        try:
            return str(json.loads(body)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = " ".join(body.decode("utf-8", "replace").split())
            if text.startswith("<"):
                return "a page of HTML; is it an OpenAI-compatible server?"
            return text[:200] or "no reason given"
