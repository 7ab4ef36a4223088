"""Numbers for Prometheus: the engine's own, read when asked, and what this process sees of each request.

Labels come from fixed sets, so that no request can add a series. The registry is this object's, not the
library's global one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from headway.engine.client import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHES = ("stop", "length", "abort", "shed", "error")
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAUGES = {
    "headway_requests_running": ("running", "Requests in the running batch."),
    "headway_requests_waiting": ("waiting", "Requests in the waiting queue."),
    "headway_kv_blocks_total": ("blocks_total", "Blocks of the KV pool."),
    "headway_kv_blocks_free": ("blocks_free", "Blocks a new request could take, cached ones included."),
    "headway_kv_blocks_cached": ("blocks_cached", "Free blocks that hold a reusable prefix."),
    "headway_kv_tokens_live": ("live_tokens", "Tokens of running requests whose KV is computed."),
    "headway_kv_cells_live": ("live_tokens", "The former name of headway_kv_tokens_live, kept for one release."),
}
_COUNTERS = {
    "headway_preemptions": ("preemptions", "Preemptions of running requests."),
    "headway_preemptions_protected": (
        "preemptions_protected",
        "Preemptions of requests that had reached the preemption limit.",
    ),
    "headway_swaps": ("swaps", "Preemptions whose KV was copied to host memory."),
    "headway_tokens_computed": ("tokens_computed", "Tokens that went through the model."),
    "headway_tokens_generated": ("tokens_generated", "Tokens sampled."),
    "headway_tokens_recomputed": ("tokens_recomputed", "Tokens of ended requests computed again after preemptions."),
    "headway_tokens_cached": ("tokens_cached", "Prompt tokens taken from the prefix cache."),
    "headway_block_copies": ("block_copies", "Blocks copied, on write or to and from host memory."),
    "headway_steps": ("steps", "Engine steps."),
}


class Tally:
    """A histogram of seconds in plain lists: adding to it runs per token, and the library's takes ten times as long."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is for what is above all bounds
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """One registry; `stats` is the engine's state as last reported."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter(
            "headway_requests", "Requests that ended, by reason.", ["finish"], registry=self._registry
        )
        for finish in FINISHES:
            self._requests.labels(finish)
        self._first_token = Tally("headway_time_to_first_token_seconds", "Arrival to first token.")
        self._inter_token = Tally("headway_inter_token_seconds", "Time between tokens of one answer.")
        self._request = Tally("headway_request_seconds", "Arrival to last token.")

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def ended(self, finish: str, seconds: float) -> None:
        self._requests.labels(finish if finish in FINISHES else "error").inc()
        self._request.observe(seconds)

    def page(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers and the times; called by the registry."""
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(self.stats, field))
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(self.stats, field))
        for tally in (self._first_token, self._inter_token, self._request):
            yield tally.family()
