"""`headway top`: a running server as a live view, from the numbers that it gives to Prometheus."""

from __future__ import annotations

import json as jsonlib
import re
import shutil
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping

from headway.cli.args import Switch
from headway.cli.remote import Remote
from headway.errors import ConfigError, EngineError

EXAMPLES = """Examples:
  headway top
  headway top --url http://llm.example:8000 --api-key KEY
  headway top --once --json | jq .tokens_per_s"""

_SAMPLE = re.compile(r'^(headway_\w+)(?:\{(?:le|finish|reason)="([^"]*)"\})? (\S+)$', re.MULTILINE)
_BAR = 24
_LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("queue", "queue_ms"))
Samples = Mapping[tuple[str, str], float]


def top(
    *, url: str = "http://localhost:8000", api_key: str | None = None, interval: float = 1.0, once: Switch = False,
    json: Switch = False,
) -> int:  # fmt: skip
    """Watch a running server: batch, queue, KV cache, tokens per second, latencies and why requests wait.

    Parameters
    ----------
    url
        The server; its /metrics is read.
    api_key
        Its key, if it asks for one.
    interval
        Seconds between two looks; rates and latencies are those of the time between.
    once
        Print one view and end, after one interval.
    json
        Print one JSON object per look.
    """
    if not 0.1 <= interval <= 3600:
        raise ConfigError(f"interval is {interval:g}; allowed: 0.1 to 3600 seconds")
    remote = Remote(url, api_key, timeout_s=10.0)
    before, since = parse(remote.metrics()), time.monotonic()
    is_screen = sys.stdout.isatty() and not json and not once
    try:
        while True:
            time.sleep(interval)
            now, at = parse(remote.metrics()), time.monotonic()
            seen = view(before, now, at - since)
            said = jsonlib.dumps(seen) if json else draw(seen, url, shutil.get_terminal_size().columns)
            sys.stdout.write(f"\x1b[H\x1b[J{said}\n" if is_screen else f"{said}\n")
            sys.stdout.flush()
            if once:
                return 0
            before, since = now, at
    except KeyboardInterrupt:
        return 0


def parse(page: str) -> dict[tuple[str, str], float]:
    """headway's own samples by name and label."""
    return {(name, label): float(value) for name, label, value in _SAMPLE.findall(page)}


def view(before: Samples, now: Samples, seconds: float) -> dict[str, object]:
    """What there is to show: gauges of now, rates and latencies of the time between."""
    if ("headway_requests_running", "") not in now:
        raise EngineError("this server gives no headway metrics; is it headway serve?")

    def gauge(name: str) -> float:
        return now.get((f"headway_{name}", ""), 0.0)

    def grown(name: str, label: str = "") -> float:
        # A counter that is smaller than before began anew with an engine that was replaced.
        last = before.get((f"headway_{name}", label), 0.0)
        current = now.get((f"headway_{name}", label), 0.0)
        return current - last if current >= last else current

    total = gauge("kv_blocks_total")
    reasons = {label: grown("wait_seconds_total", label) for name, label in now if name == "headway_wait_seconds_total"}
    waited = sum(reasons.values())
    computed, cached = grown("tokens_computed_total"), grown("tokens_cached_total")
    generated = grown("tokens_generated_total")
    prompts = max(0.0, computed - generated)
    return {
        "running": int(gauge("requests_running")),
        "slots": int(gauge("slots_total")),
        "waiting": int(gauge("requests_waiting")),
        "kv_used": round(1 - gauge("kv_blocks_free") / total, 4) if total else 0.0,
        "kv_cached": round(gauge("kv_blocks_cached") / total, 4) if total else 0.0,
        "tokens_per_s": round(generated / seconds, 1),
        "prompt_tokens_per_s": round(prompts / seconds, 1),
        "steps_per_s": round(grown("steps_total") / seconds, 1),
        "cache_hit_rate": round(cached / (cached + prompts), 3) if cached + prompts else None,
        "requests_per_s": {
            label: round(grown("requests_total", label) / seconds, 2) for name, label in now
            if name == "headway_requests_total"
        },
        "preemptions": int(grown("preemptions_total")),
        "ttft_ms": quantiles(before, now, "time_to_first_token_seconds"),
        "itl_ms": quantiles(before, now, "inter_token_seconds"),
        "queue_ms": quantiles(before, now, "queue_seconds"),
        "waited_for": {reason: round(part / waited, 3) for reason, part in reasons.items() if part > 0},
    }  # fmt: skip


def quantiles(before: Samples, now: Samples, name: str) -> dict[str, float] | None:
    """P50 and P99 in milliseconds from the buckets' growth, linear within a bucket; None: there was nothing."""
    key = f"headway_{name}_bucket"
    bounds = sorted((float(label), label) for each, label in now if each == key)
    grown = [now[key, label] - before.get((key, label), 0.0) for _, label in bounds]
    if not grown or grown[-1] <= 0:
        return None
    found = {}
    for share in (0.5, 0.99):
        wanted = share * grown[-1]
        at = bisect_left(grown, wanted)
        low, below = (bounds[at - 1][0], grown[at - 1]) if at else (0.0, 0.0)
        high = bounds[at][0] if bounds[at][0] != float("inf") else low
        inside = (wanted - below) / (grown[at] - below) if grown[at] > below else 1.0
        found[f"p{round(100 * share)}"] = round(1e3 * (low + inside * (high - low)), 2)
    return found


def draw(seen: Mapping[str, object], url: str, width: int) -> str:
    """The view as lines no wider than the terminal."""
    slots, running = int(str(seen["slots"])), int(str(seen["running"]))
    used, cached = float(str(seen["kv_used"])), float(str(seen["kv_cached"]))
    rates = seen["requests_per_s"]
    reasons = seen["waited_for"]
    assert isinstance(rates, dict)
    assert isinstance(reasons, dict)
    ended = ", ".join(f"{name} {rate:g}/s" for name, rate in rates.items() if rate) or "none"
    why = ", ".join(f"{name} {share:.0%}" for name, share in sorted(reasons.items(), key=lambda each: -each[1]))
    hits = seen["cache_hit_rate"]
    lines = [
        f"headway {url}  {time.strftime('%H:%M:%S')}",
        "",
        f"batch     {_bar(running / slots if slots else 0.0)} {running} of {slots} slots, {seen['waiting']} waiting",
        f"KV cache  {_bar(used)} {used:.1%} in use, {cached:.1%} cached and free",
        f"tokens    {seen['tokens_per_s']} /s generated, {seen['prompt_tokens_per_s']} /s of prompts computed"
        + ("" if hits is None else f", {hits:.0%} of prompts from the cache"),
        f"steps     {seen['steps_per_s']} /s, {seen['preemptions']} preemptions",
        f"ended     {ended}",
        "",
        f"{'':9} {'P50':>10} {'P99':>10}",
        *(f"{title:9} {_times(seen[name])}" for title, name in _LATENCIES),
        "",
        f"waited for: {why or 'nothing'}",
    ]  # fmt: skip
    return "\n".join(line[:width] for line in lines)


def _bar(share: float) -> str:
    full = round(_BAR * min(1.0, max(0.0, share)))
    return f"[{'#' * full}{'.' * (_BAR - full)}]"


def _times(found: object) -> str:
    if not isinstance(found, dict):
        return f"{'-':>10} {'-':>10}"
    return " ".join(f"{found[name]:>7.4g} ms" for name in ("p50", "p99"))
