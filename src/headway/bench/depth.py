"""Which overlap depth is faster on this machine: the same work at depth 1 and 2, interleaved, medians.

Depth 2 plans the next step while the executor runs this one; on a machine whose cores all compute, the planner
takes time from the kernels instead. The default of `SchedulerConfig.depth` is what this bench showed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench.workload import VOCAB, chat_mix
from headway.build import build_engine
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.values.params import SamplingParams


def measure(loaded: LoadedCpu, depth: int, requests: int, seed: int) -> float:
    """Output tokens per second of one run at this depth."""
    config = EngineConfig.of(depth=depth, max_waiting=max(1, requests), prefix_caching=False)
    engine = build_engine(config, loaded)
    works = chat_mix(requests, seed)
    try:
        began = time.perf_counter()
        for id, work in enumerate(works):
            engine.add(
                Submit(id, work.tokens, SamplingParams(max_tokens=work.max_tokens, temperature=0, ignore_eos=True))
            )
        while engine.has_work:
            engine.step()
        return sum(work.max_tokens for work in works) / (time.perf_counter() - began)
    finally:
        engine.close()


def run(as_json: bool = False, requests: int = 32, rounds: int = 3, seed: int = 0) -> int:
    """Print a line per run and the medians; with `as_json` the last line is one object."""
    if requests < 1 or rounds < 1:
        raise ConfigError(f"requests is {requests} and rounds is {rounds}; allowed: 1 or more")
    loaded = load_model(EngineConfig())
    if loaded.spec.vocab_size < VOCAB:
        raise ConfigError(f"this workload needs a vocabulary of {VOCAB} tokens; the model has {loaded.spec.vocab_size}")
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for round_ in range(rounds):
        for depth in speeds:
            speed = measure(loaded, depth, requests, seed)
            speeds[depth].append(speed)
            print(f"round {round_ + 1}  depth {depth}  {speed:8.1f} output tok/s", flush=True)
    medians = {depth: round(statistics.median(values), 1) for depth, values in speeds.items()}
    print(f"median     depth 1 {medians[1]}   depth 2 {medians[2]}   ratio {medians[2] / medians[1]:.3f}")
    if as_json:
        rows = [{"depth": depth, "out_tok_s": speed} for depth, speed in medians.items()]
        sys.stdout.write(json.dumps({"requests": requests, "seed": seed, "rows": rows}) + "\n")
    return 0
