"""Numbers for Prometheus: the engine's own, read when asked, and what this process sees of each request.

Labels come from fixed sets, so that no request can add a series. The registry is this object's, not the
library's global one. `vllm_names` gives the same numbers under the names that public dashboards read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from headway.embedding.client import EmbeddingClient
from headway.engine.client import EngineInfo, Output, Stats
from headway.values.states import WaitReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHES = ("stop", "length", "abort", "shed", "error")
WAIT_REASONS = tuple(reason.name.lower() for reason in WaitReason)
RECENT = 4096  # ITLs, and answers, from which quantiles are taken
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
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
    "headway_tokens_from_tier": ("tokens_from_tier", "Of those, loaded from host memory or disk."),
    "headway_tokens_from_peers": ("tokens_from_peers", "Of those, fetched from other engines."),
    "headway_failed_loads": ("failed_loads", "Loads of KV that brought less than was asked for."),
    "headway_block_copies": ("block_copies", "Blocks copied, on write or to and from host memory."),
    "headway_spec_drafts": ("drafts", "Rows of steps that verified draft tokens."),
    "headway_spec_tokens_drafted": ("tokens_drafted", "Draft tokens verified, those that a grammar forces included."),
    "headway_spec_tokens_accepted": ("tokens_accepted", "Of those, the ones that were right."),
    "headway_steps": ("steps", "Engine steps."),
    "headway_engine_restarts": ("restarts", "Engine processes that were replaced."),
}
_OF_VECTORS = {
    "texts": "Texts that were made vectors.",
    "tokens": "Tokens of those texts.",
    "restarts": "Processes that make vectors and were replaced.",
}


class Tally:
    """A histogram in plain lists: adding to it runs per token, and the library's takes ten times as long."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is for what is above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Many at once, for a fourth of the time."""
        for at, count in Counter(map(bisect_left, repeat(self._bounds), values)).items():
            self._counts[at] += count
        self.sum += sum(values)

    def family(self, name: str = "", **labels: str) -> Metric:
        """As a histogram; with another name and labels if they are given."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(name or self._name, self._text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets=buckets, sum_value=self.sum)
        return family


class Metrics:
    """One registry; `stats` is the engine's state as last reported, `info` what it is, once it is ready."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.info: EngineInfo | None = None
        self.vectors: EmbeddingClient | None = None  # None: no model makes vectors here
        self.finished = dict.fromkeys(FINISHES, 0)
        self.num_prompt = self.num_output = self.num_cached = 0  # tokens of answers that have ended
        self.first_tokens = Tally("headway_time_to_first_token_seconds", "Arrival to first token.")
        self.inter_tokens = Tally("headway_inter_token_seconds", "Time between tokens of one answer.")
        self.requests = Tally("headway_request_seconds", "Arrival to last token.")
        self.queued = Tally("headway_queue_seconds", "Arrival to first admission.")
        self.prefills = Tally("headway_prefill_seconds", "Time in a slot until the first token.")
        self.decodes = Tally("headway_decode_seconds", "Time in a slot from the first token on.")
        self.prompts = Tally("headway_prompt_tokens", "Prompt tokens of one answer.", _TOKENS)
        self.outputs = Tally("headway_completion_tokens", "Tokens of one answer.", _TOKENS)
        self.itls: list[float] = []  # that are not in `inter_tokens` yet
        self._itls: deque[float] = deque(maxlen=RECENT)
        self._slowest: deque[tuple[float, bool]] = deque(maxlen=RECENT)  # longest ITL, and whether preempted
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def first_token(self, seconds: float) -> None:
        self.first_tokens.observe(seconds)

    def settle(self) -> None:
        """Take in what was noted since."""
        if self.itls:
            self.inter_tokens.observe_all(self.itls)
            self._itls.extend(self.itls)
            self.itls.clear()

    def ended(self, finish: str, seconds: float) -> None:
        self.finished[finish if finish in FINISHES else "error"] += 1
        self.requests.observe(seconds)

    def counted(self, num_prompt: int, num_output: int, longest_s: float, output: Output) -> None:
        """An answer's counts and times are known; `longest_s` is its longest ITL."""
        self.num_prompt += num_prompt
        self.num_output += num_output
        self.num_cached += output.cached_tokens
        self.prompts.observe(num_prompt)
        self.outputs.observe(num_output)
        if longest_s > 0.0:
            self._slowest.append((longest_s, output.preemptions > 0))
        if output.timing is not None:
            self.queued.observe(output.timing.queued_s)
            self.prefills.observe(output.timing.prefill_s)
            self.decodes.observe(output.timing.decode_s)

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
        yield _labelled("headway_requests", "Requests that ended, by reason.", "finish", self.finished)
        waited = {reason: self.stats.waited.get(reason, 0.0) for reason in WAIT_REASONS}
        yield _labelled("headway_wait_seconds", "Waiting time of ended requests, by reason.", "reason", waited)
        text = "Open requests of each replica that is up."
        yield _labelled("headway_replica_requests", text, "replica", self.stats.replicas, GaugeMetricFamily)
        yield from self._derived()
        for field, text in _OF_VECTORS.items() if self.vectors is not None else ():
            yield CounterMetricFamily(f"headway_embedding_{field}", text, value=getattr(self.vectors, f"num_{field}"))
        for tally in self.tallies():
            yield tally.family()
        if self.info is not None:
            from headway.serve.vllm_names import families  # it reads this file's names

            yield from families(self, self.info)

    def tallies(self) -> tuple[Tally, ...]:
        times = (self.first_tokens, self.inter_tokens, self.requests, self.queued, self.prefills, self.decodes)
        return (*times, self.prompts, self.outputs)

    def _derived(self) -> Iterator[Metric]:
        ratio, share = self.steadiness()
        text = "P99 over P50 of the time between tokens, of the last ones."
        yield GaugeMetricFamily("headway_inter_token_p99_over_p50", text, value=ratio)
        text = "Of the answers with an ITL of P99 or more, the share that was preempted."
        yield GaugeMetricFamily("headway_inter_token_p99_preempted_share", text, value=share)
        slots = 0 if self.info is None else self.info.max_num_seqs
        yield GaugeMetricFamily("headway_slots_total", "Slots of the batch, as configured.", value=slots)
        text = "Share of the tokens that blocks in use could hold and do not."
        yield GaugeMetricFamily("headway_kv_fragmentation_ratio", text, value=self.fragmentation)

    @property
    def fragmentation(self) -> float:
        """Shared blocks hold tokens of several requests, which can make up for all that is unused: 0 then."""
        in_use = self.stats.blocks_total - self.stats.blocks_free
        room = in_use * (0 if self.info is None else self.info.block_size)
        return max(0.0, 1.0 - self.stats.live_tokens / room) if room else 0.0

    def steadiness(self) -> tuple[float, float]:
        """P99 over P50 of recent ITLs, and the share of answers with such an ITL that were preempted."""
        itls = sorted(self._itls)
        if not itls:
            return 1.0, 0.0
        median, most = itls[len(itls) // 2], itls[int(0.99 * (len(itls) - 1))]
        slow = [was_preempted for longest, was_preempted in self._slowest if longest >= most]
        return most / median if median > 0 else 1.0, sum(slow) / len(slow) if slow else 0.0


def _labelled(
    name: str,
    text: str,
    label: str,
    values: dict[str, int] | dict[str, float],
    kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
) -> Metric:
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
