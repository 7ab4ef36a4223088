"""OpenTelemetry traces, where they are asked for: a span per request, and within it queue, prefill and decode.

Spans are made when a response has ended, from the times that the engine measured, so that nothing runs per token. They
go to a collector in batches, from a thread of the library; a collector that is not there costs the spans and no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from headway.about import __version__
from headway.errors import ConfigError
from headway.extras import missing

log = logging.getLogger(__name__)

_FLUSH_MS = 1000
_EXPORT_S = 2
_PARTS = ("queue", "prefill", "decode")


class Tracing:
    """Spans of one server."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            what = missing("otlp_endpoint", "opentelemetry-exporter-otlp-proto-http", extra="otel")
            raise ConfigError(what) from error
        resource = Resource.create({"service.name": "headway", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)

    def record(self, headers: Mapping[str, str], fields: Mapping[str, Any], begun_ns: int, ended_ns: int) -> None:
        """A response has ended; `fields` are those of its log line, `headers` may name the caller's trace."""
        from opentelemetry import trace

        context = self._propagator.extract(headers)
        # A path that anyone may make up is no name of a span.
        name = f"{fields['method']} {fields['path']}" if "finish" in fields else str(fields["method"])
        span = self._tracer.start_span(
            name, context=context, kind=trace.SpanKind.SERVER, attributes=_attributes(fields), start_time=begun_ns
        )
        if fields["status"] >= 500:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        at = begun_ns
        for part in _PARTS:
            length = round(1e6 * fields.get(f"{part}_ms", 0.0))
            if length > 0:
                child = self._tracer.start_span(part, context=inside, start_time=at)
                at = min(at + length, ended_ns)
                child.end(at)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is left, for a second at most."""
        # The library looks at its limit between batches only: a collector that hangs would cost two seconds for each.
        flush = threading.Thread(target=self._provider.force_flush, args=(_FLUSH_MS,), name="traces", daemon=True)
        flush.start()
        flush.join(_FLUSH_MS / 1e3)


def _attributes(fields: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Names of the semantic conventions, for HTTP and for generative models."""
    names = {
        "method": "http.request.method",
        "path": "url.path",
        "status": "http.response.status_code",
        "request_id": "headway.request_id",
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "headway.cached_tokens",
        "finish": "gen_ai.response.finish_reasons",
        "ttft_ms": "headway.ttft_ms",
        "preemptions": "headway.preemptions",
    }
    return {name: fields[field] for field, name in names.items() if field in fields}
