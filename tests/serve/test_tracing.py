"""Traces reach a real collector, belong to the caller's trace, and a collector that is away harms nothing."""

from __future__ import annotations

import builtins
import gzip
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hash_engine import hash_engine
from headway.errors import ConfigError
from headway.serve.tracing import Tracing
from running import running
from serve_harness import Harness, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    spans: list[Any] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Takes)
    with running(http):
        yield f"http://127.0.0.1:{http.server_port}", spans


def ask(server: Harness, **headers: str) -> None:
    body = json.dumps({"prompt": list(range(1, 41)), "max_tokens": 8}).encode()
    told = {"content-type": "application/json", **headers}
    urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body, told)).read()


def test_a_request_is_a_span_with_its_parts_in_the_callers_trace() -> None:
    with collector() as (url, spans):
        with serving(hash_engine(1), name="hash", otlp_endpoint=url) as server:  # type: ignore[arg-type]
            ask(server, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
            server.do(_flushed(server))
        (whole,) = [span for span in spans if span.name == "POST /v1/completions"]
        assert whole.trace_id.hex() == TRACE
        told = {each.key: each.value for each in whole.attributes}
        assert told["gen_ai.usage.input_tokens"].int_value == 40
        assert told["gen_ai.usage.output_tokens"].int_value == 8
        assert told["http.response.status_code"].int_value == 200
        parts = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
        assert {"prefill", "decode"} <= parts.keys()
        for part in parts.values():
            assert whole.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano
            assert part.end_time_unix_nano <= whole.end_time_unix_nano


def _flushed(server: Harness) -> Any:
    async def flush() -> None:
        assert server.service.tracing is not None
        server.service.tracing.close()

    return flush


def test_a_collector_that_is_away_costs_no_answer_and_no_end() -> None:
    with serving(hash_engine(1), name="hash", otlp_endpoint="http://127.0.0.1:9") as server:  # type: ignore[arg-type]
        ask(server)
        begun = time.monotonic()
        closing = threading.Thread(target=lambda: server.do(_flushed(server)))
        closing.start()
        closing.join(15)
        assert not closing.is_alive()
        assert time.monotonic() - begun < 15


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs opentelemetry.*\[otel\]"):
        Tracing("http://localhost:4318")


def test_a_collector_that_hangs_does_not_delay_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        tracing = Tracing(f"http://127.0.0.1:{deaf.getsockname()[1]}")
        fields = {"method": "POST", "path": "/v1/completions", "status": 200, "finish": "length"}
        for _ in range(1200):  # three batches
            tracing.record({}, fields, 1, 2)
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 1.9  # a second, on a busy machine
