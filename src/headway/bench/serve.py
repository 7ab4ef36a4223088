"""The same workload through headway's server and without it: what HTTP, text and a second process cost.

A real `headway serve` answers as many concurrent streams as are asked for; beside it the same requests run offline in
this process, in turns, round by round, and the medians count. While one side runs, the other waits and computes
nothing. The client's own processor time is printed: on a small machine it is taken from the server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from headway.backends.cpu import load_model
from headway.bench.client import Target, offered, run_streams
from headway.bench.console import print_json, print_table, progress
from headway.bench.latency import DEFAULT_OBJECTIVES, Answered, Objectives, print_latencies, summary
from headway.bench.offline import WARM_UP, Continuous, OfflineJob
from headway.bench.server import ServerProcess
from headway.bench.setup import ModelSetup, at_least_one, describe
from headway.bench.workload import WorkItem, fit, named
from headway.config import EngineConfig
from headway.engine.garbage import settle_garbage


@dataclass(slots=True)
class ServeRounds:
    """What the server did, round by round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # processor seconds of the client
    answers: list[Answered] = field(default_factory=list)


def run(
    setup: ModelSetup,
    workload: str = "chat-mix",
    requests: int = 32,
    streams: int = 32,
    rounds: int = 3,
    seed: int = 0,
    objectives: Objectives = DEFAULT_OBJECTIVES,
    *,
    as_json: bool = False,
) -> int:
    """Print both speeds, their ratio and latencies; with `as_json` the last line is one object."""
    at_least_one(requests=requests, streams=streams, rounds=rounds)
    job = OfflineJob(named(workload).make(requests, seed), min(streams, requests))
    config = job.config(setup)
    loaded = load_model(config)
    works = fit(job.works, loaded.spec.vocab_size, loaded.spec.max_len)
    served, offline_s = ServeRounds(), list[float]()
    with ExitStack() as stack, progress("serve", 2 * rounds) as update:
        url = stack.enter_context(ServerProcess(server_flags(setup, config))).url
        target = Target.of(url, offered(url)[0])
        offline = stack.enter_context(closing(Continuous(config, loaded)))
        run_streams(target, WARM_UP, 1, "warm-up")
        offline.answer(WARM_UP, lambda done: None)
        settle_garbage()
        for round_ in range(rounds):
            began = time.perf_counter()
            offline.answer(works, lambda done: None)
            offline_s.append(time.perf_counter() - began)
            update(2 * round_ + 1)
            _serve(target, works, streams, f"round-{seed}-{round_}", served)
            update(2 * round_ + 2)
    facts = describe(loaded, config) | {"workload": workload, "seed": seed}
    _report(job, served, offline_s, summary(served.answers, objectives), facts, as_json)
    return 0


def server_flags(setup: ModelSetup, config: EngineConfig) -> list[str]:
    """The server gets the engine that runs offline: the same pool, slots and budget, and no prefix cache."""
    chosen = {
        "num-blocks": config.cache.num_blocks,
        "max-num-seqs": config.scheduler.num_slots,
        "max-num-batched-tokens": config.scheduler.num_tokens,
        "max-waiting": config.scheduler.max_waiting,
    }
    return [
        *setup.flags(),
        *(f"--{name}={value}" for name, value in chosen.items()),
        "--no-prefix-caching",
        "--touch-kv",
    ]


def _serve(target: Target, works: Sequence[WorkItem], streams: int, salt: str, served: ServeRounds) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = run_streams(target, works, streams, salt)
    served.seconds.append(time.perf_counter() - began)
    served.cpu.append(time.process_time() - cpu)
    for stream, work in zip(found, works, strict=True):
        answer = stream.read()
        answer.num_tokens = work.max_tokens  # it was checked to be as long; pieces may hold several
        served.answers.append(answer)


def _report(
    job: OfflineJob,
    served: ServeRounds,
    offline_s: Sequence[float],
    seen: dict[str, Any],
    facts: dict[str, object],
    as_json: bool,
) -> None:
    over_http, offline = (job.out_tokens / statistics.median(seconds) for seconds in (served.seconds, offline_s))
    cpu = sum(served.cpu)
    record: dict[str, object] = {
        "n": len(job.works),
        "streams": job.slots,
        "in_tok": job.in_tokens,
        "out_tok": job.out_tokens,
        "out_tok_s": round(over_http, 1),
        "offline_tok_s": round(offline, 1),
        "ratio": round(over_http / offline, 3),
        "rounds": len(offline_s),
        "runs_s": [round(seconds, 3) for seconds in served.seconds],
        "offline_runs_s": [round(seconds, 3) for seconds in offline_s],
        **seen,
        "first_ms": seen["ttft_ms"],  # the former names of `ttft_ms` and `itl_ms`, kept for one release
        "gap_ms": seen["itl_ms"],
        "client_cpu_share": round(cpu / sum(served.seconds), 4),
        "client_us_per_token": round(1e6 * cpu / (job.out_tokens * len(offline_s)), 1),
    }
    print_table(
        ("", "output tok/s", "s"),
        [("offline", offline, statistics.median(offline_s)), ("server", over_http, statistics.median(served.seconds))],
        f"{facts['workload']}, {len(job.works)} requests, {job.slots} streams: the server makes {record['ratio']} of "
        f"offline; the client took {record['client_us_per_token']} us of processor time per token",
    )
    print_latencies(seen, len(served.answers))
    if as_json:
        print_json(record | facts)
