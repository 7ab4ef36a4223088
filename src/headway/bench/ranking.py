"""What a ranker is worth on a request log: how well it orders later traffic, and what a queue gains by it.

The held-out arrivals go through the production scheduler under a virtual clock four times: first come first served,
then shortest job first by averages (T0), by the ranker and by an oracle. A ranker's share of the gain is how far it
gets from the first to the last: (fcfs - ranker) / (fcfs - oracle) of the mean time from arrival to the last token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from headway.bench.policy.workloads import capacity, mean, quantile
from headway.bench.virtual import BLOCK, EngineSetup, Job, simulate
from headway.control.lengths import Lengths
from headway.core.policy import Policy
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.sjf import ShortestJobFirst
from headway.rank.log import Entry
from headway.rank.model import RankModel
from headway.rank.tau import kendall_tau
from headway.values.limits import Limits

_TIMED = 500  # requests whose scoring is timed


@dataclass(frozen=True, slots=True)
class RankingTimes:
    """Seconds from arrival to the last token, under one order."""

    order: str
    mean_s: float
    p99_s: float
    mean_wait_s: float
    share: float  # of the oracle's gain over fcfs


@dataclass(frozen=True, slots=True)
class RankingReport:
    """On requests the ranker has not learned from."""

    num_learned: int
    num_held_out: int
    num_cut: int  # of the held-out
    tau: float
    tau_plain: float  # of T0
    coverage: float  # share of answers that stayed within their ceiling
    score_us: float  # median time to score one request, features included
    load: float  # arrivals over what the engine can serve
    orders: list[RankingTimes]

    def record(self) -> dict[str, object]:
        return asdict(self)


def judge(
    model: RankModel, learned: Sequence[Entry], held_out: Sequence[Entry], *, load: float, slots: int
) -> RankingReport:
    """Everything about one model; `load` spreads the arrivals so that they are so much of what can be served."""
    averages = Lengths()
    for entry in learned:
        averages.learn(entry.tenant, entry.route, entry.num_output, entry.is_cut)
    plain = [averages.expect(entry.tenant, entry.route, entry.max_tokens).median for entry in held_out]
    expected = [model.expect(entry.sample().features) for entry in held_out]
    whole = [at for at, entry in enumerate(held_out) if entry.finish != "abort"]
    truth = [float(held_out[at].num_output) for at in whole]
    held = sum(held_out[at].num_output <= expected[at].ceiling + 0.5 for at in whole)
    ranked = [each.median for each in expected]
    return RankingReport(
        num_learned=len(learned),
        num_held_out=len(held_out),
        num_cut=sum(entry.is_cut for entry in held_out),
        tau=kendall_tau([ranked[at] for at in whole], truth),
        tau_plain=kendall_tau([plain[at] for at in whole], truth),
        coverage=held / max(1, len(whole)),
        score_us=_score_us(model, held_out[:_TIMED]),
        load=load,
        orders=replay(held_out, plain, ranked, load=load, slots=slots),
    )


def _score_us(model: RankModel, entries: Sequence[Entry]) -> float:
    took = []
    for entry in entries:
        before = time.perf_counter()
        model.expect(entry.sample().features)
        took.append(1e6 * (time.perf_counter() - before))
    return quantile(took, 0.5)


def replay(
    entries: Sequence[Entry], plain: Sequence[float], ranked: Sequence[float], *, load: float, slots: int
) -> list[RankingTimes]:
    """The same arrivals under four orders."""
    oracle = [float(entry.num_output) for entry in entries]
    times = _arrivals(entries, load, slots)
    runs: list[tuple[str, Callable[[], Policy], Sequence[float]]] = [
        ("fcfs", FirstComeFirstServed, plain),
        ("sjf by averages", ShortestJobFirst, plain),
        ("sjf by the ranker", ShortestJobFirst, ranked),
        ("sjf by an oracle", ShortestJobFirst, oracle),
    ]
    found: list[tuple[str, float, float, float]] = []
    for name, policy, said in runs:
        jobs = [_job(entry, at, guess) for entry, at, guess in zip(entries, times, said, strict=True)]
        records = simulate(jobs, _setup(policy, slots, entries)).records
        totals = [record.total for record in records]
        found.append((name, mean(totals), quantile(totals, 0.99), mean([record.ttft for record in records])))
    first, last = found[0][1], found[-1][1]
    gain = first - last if first > last else math.inf  # no request waits: there is nothing to gain
    return [RankingTimes(name, total, p99, wait, (first - total) / gain) for name, total, p99, wait in found]


def _arrivals(entries: Sequence[Entry], load: float, slots: int) -> list[float]:
    """The log's own interarrival times, scaled to the load; 0 or a log without times: all at once."""
    span = entries[-1].at - entries[0].at
    if not load or not span:
        return [0.0] * len(entries)
    jobs = [_job(entry, 0.0, 0.0) for entry in entries]
    rate = load * capacity(jobs, _setup(FirstComeFirstServed, slots, entries))
    return [(entry.at - entries[0].at) / span * len(entries) / rate for entry in entries]


def _job(entry: Entry, at: float, expected: float) -> Job:
    num_output = max(1, entry.num_output)
    most = max(entry.max_tokens, num_output)
    return Job(at, max(1, len(entry.tokens)), num_output, max_tokens=most, expected=max(1.0, expected))


def _setup(policy: Callable[[], Policy], slots: int, entries: Sequence[Entry]) -> EngineSetup:
    """Slots are scarce and memory is not: the case measures the order alone."""
    largest = max(len(entry.tokens) + max(entry.max_tokens, entry.num_output) for entry in entries)
    blocks = 2 * (slots + 1) * (largest // BLOCK + 2)
    return EngineSetup(policy, Limits(slots, max(512, slots)), num_blocks=blocks)
