"""Half of what a real engine can serve: nobody waits, so no order may cost anybody anything.

A machine that is shared is faster in one minute than in the next, so every policy runs right beside first come, first
served and is compared with that run alone. What counts as equal is what nine in ten runs of first come, first served
differ by from the one before.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from headway import plugins
from headway.backends.cpu import load_model
from headway.bench.live import Live, random_prompt
from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.rounds import Rounds
from headway.bench.setup import ModelSetup
from headway.bench.virtual import BenchRun, Job
from headway.config import EngineConfig

SLOTS, LOAD, SECONDS = 32, 0.5, 6.0


@dataclass(frozen=True, slots=True)
class HarmTimes:
    """Of one run, seconds from arrival to the last token."""

    mean: float
    p99: float

    @staticmethod
    def of(run: BenchRun) -> HarmTimes:
        totals = [record.total for record in run.records]
        return HarmTimes(workloads.mean(totals), workloads.quantile(totals, 0.99))


@dataclass(frozen=True, slots=True)
class Pair:
    """First come, first served, and a policy right before or after it."""

    fcfs: HarmTimes
    other: HarmTimes


MEASURES: Mapping[str, Callable[[HarmTimes], float]] = {"mean end to end": attrgetter("mean"), "P99": attrgetter("p99")}


def harm(setup: ModelSetup, seed: int, rounds: int) -> Iterator[Claim]:
    """Every policy against fcfs, in pairs."""
    loaded = load_model(setup.config())
    live = Live(loaded, random_prompt(seed, loaded.spec.vocab_size))
    burst = [Job(0.0, *_lengths(random.Random(f"{seed}:{number}"))) for number in range(64)]
    capacity = len(burst) / live.serve(burst, _config(setup, "fcfs")).makespan
    yield Claim("harm", "requests per second that the engine can serve of this", capacity)
    rng = random.Random(seed)
    jobs = [Job(at, *_lengths(rng)) for at in workloads.poisson(rng, LOAD * capacity, SECONDS)]
    others = [name for name in plugins.names("policies") if name != "fcfs"]
    pairs: Rounds[Pair] = Rounds(others)
    for name in pairs.turns(rounds):
        # Whoever is second may find the machine otherwise: in every other round that is fcfs.
        order = ("fcfs", name) if len(pairs[name]) % 2 == 0 else (name, "fcfs")
        found = {policy: HarmTimes.of(live.serve(jobs, _config(setup, policy))) for policy in order}
        pairs.add(name, Pair(found["fcfs"], found[name]))
    yield from _claims(pairs, others, rounds)


def _claims(pairs: Rounds[Pair], others: Sequence[str], rounds: int) -> Iterator[Claim]:
    """By the medians of the ratios within pairs, over what two runs of fcfs, one after the other, differ by."""
    fcfs = [pairs[name][number].fcfs for number in range(rounds) for name in others]
    for what, of in MEASURES.items():
        spread = workloads.quantile([_apart(of(one), of(other)) for one, other in pairwise(fcfs)], 0.9)
        yield Claim("harm", f"{LOAD}x, nine in ten runs of fcfs differ from the one before by: {what}", spread)
        for name in others:
            worse = statistics.median(of(pair.other) / of(pair.fcfs) for pair in pairs[name])
            yield Claim("harm", f"{LOAD}x, {name} over fcfs: {what}", worse, most=spread)


def _apart(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


def _lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randint(16, 200), rng.randint(8, 120)


def _config(setup: ModelSetup, policy: str) -> EngineConfig:
    return setup.config(policy=policy, max_num_seqs=SLOTS, prefix_caching=False, touch_kv=True, num_blocks=SLOTS * 24)
