"""Half of what a real engine can serve: nobody waits, so no order may cost anybody anything.

First come, first served runs twice in every round: how much it differs from itself is what the others are measured by.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from headway import plugins
from headway.bench.live import Live, random_prompt
from headway.bench.policy import laws
from headway.bench.policy.claim import Claim
from headway.bench.policy.rounds import Rounds, median
from headway.bench.setup import Setup
from headway.bench.virtual import Job, Run
from headway.build import load_model
from headway.config import EngineConfig

SEATS, LOAD, SECONDS = 32, 0.5, 10.0
FIRST = ("fcfs", "fcfs again")


@dataclass(frozen=True, slots=True)
class Times:
    """Of one run, seconds from arrival to the last token."""

    mean: float
    p99: float

    @staticmethod
    def of(run: Run) -> Times:
        totals = [trip.total for trip in run.trips]
        return Times(laws.mean(totals), laws.quantile(totals, 0.99))


def harm(setup: Setup, seed: int, rounds: int) -> Iterator[Claim]:
    """Every policy, by the medians of its mean and P99 over the worst that fcfs had in any round."""
    loaded = load_model(setup.config())
    live = Live(loaded, random_prompt(seed, loaded.spec.vocab_size))
    burst = [Job(0.0, *_lengths(random.Random(f"{seed}:{number}"))) for number in range(64)]
    capacity = len(burst) / live.serve(burst, _config(setup, "fcfs")).makespan
    yield Claim("harm", "requests per second that the engine can serve of this", capacity)
    rng = random.Random(seed)
    jobs = [Job(at, *_lengths(rng)) for at in laws.poisson(rng, LOAD * capacity, SECONDS)]
    others = [name for name in plugins.names("policies") if name != "fcfs"]
    runs: Rounds[Times] = Rounds((FIRST[0], *others, FIRST[1]))
    for name in runs.turns(rounds):
        runs.add(name, Times.of(live.serve(jobs, _config(setup, name.split()[0]))))
    first = [times for name in FIRST for times in runs[name]]
    mean, p99 = max(times.mean for times in first), max(times.p99 for times in first)
    yield Claim("harm", "fcfs, worst run over best: mean end to end", mean / min(times.mean for times in first))
    for name in others:
        found = runs[name]
        worse = median(found, lambda times: times.mean) / mean
        yield Claim("harm", f"{LOAD}x, {name} over the worst of fcfs: mean end to end", worse, most=1.0)
        worse = median(found, lambda times: times.p99) / p99
        yield Claim("harm", f"{LOAD}x, {name} over the worst of fcfs: P99", worse, most=1.0)


def _lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randint(16, 200), rng.randint(8, 120)


def _config(setup: Setup, policy: str) -> EngineConfig:
    return setup.config(policy=policy, max_num_seqs=SEATS, prefix_caching=False, touch_kv=True, num_blocks=SEATS * 24)
