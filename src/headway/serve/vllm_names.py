"""The same numbers under vLLM's metric names, with its labels: dashboards and routers that read those need no change.

Only what has the same meaning here is given. `engine` is always "0": one server has one engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.engine.client import EngineInfo
from headway.serve.metrics import Metrics

_FINISHED = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


def families(metrics: Metrics, info: EngineInfo) -> Iterator[Metric]:
    """All of them, for this engine."""
    labels, stats = {"model_name": info.model, "engine": "0"}, metrics.stats
    used = 1.0 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0
    gauges = {
        "vllm:num_requests_running": ("Requests in the running batch.", float(stats.running)),
        "vllm:num_requests_waiting": ("Requests in the waiting queue.", float(stats.waiting)),
        "vllm:kv_cache_usage_perc": ("KV blocks in use; 1 is all of them.", used),
    }
    for name, (text, value) in gauges.items():
        yield _one(GaugeMetricFamily(name, text, labels=list(labels)), labels, value)
    counters = {
        "vllm:num_preemptions": ("Preemptions of running requests.", stats.preemptions),
        "vllm:prompt_tokens": ("Prompt tokens of answers that have ended.", metrics.num_prompt),
        "vllm:generation_tokens": ("Tokens sampled.", stats.tokens_generated),
        "vllm:prefix_cache_queries": ("Prompt tokens of answers that have ended.", metrics.num_prompt),
        "vllm:spec_decode_num_drafts": ("Rows of steps that verified draft tokens.", stats.drafts),
        "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified.", stats.tokens_drafted),
        "vllm:spec_decode_num_accepted_tokens": ("Of these, the ones that were right.", stats.tokens_accepted),
        "vllm:prefix_cache_hits": ("Of these, tokens found in the prefix cache.", metrics.num_cached),
    }
    for name, (text, count) in counters.items():
        yield _one(CounterMetricFamily(name, text, labels=list(labels)), labels, float(count))
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by reason.", labels=[*labels, "finished_reason"]
    )
    for ours, theirs in _FINISHED.items():
        success.add_metric([*labels.values(), theirs], metrics.finished[ours])
    yield success
    for name, tally in {
        "vllm:time_to_first_token_seconds": metrics.first_tokens,
        "vllm:inter_token_latency_seconds": metrics.inter_tokens,
        "vllm:time_per_output_token_seconds": metrics.inter_tokens,
        "vllm:e2e_request_latency_seconds": metrics.requests,
        "vllm:request_queue_time_seconds": metrics.queued,
        "vllm:request_prefill_time_seconds": metrics.prefills,
        "vllm:request_decode_time_seconds": metrics.decodes,
        "vllm:request_prompt_tokens": metrics.prompts,
        "vllm:request_generation_tokens": metrics.outputs,
    }.items():
        yield tally.family(name, **labels)
    config = {**labels, "block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
    yield _one(GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=list(config)), config, 1.0)


def _one(family: GaugeMetricFamily | CounterMetricFamily, labels: Mapping[str, str], value: float) -> Metric:
    family.add_metric(list(labels.values()), value)
    return family
