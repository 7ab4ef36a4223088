"""Who goes first on a real engine: short and long answers, all asked for at once, eight seats.

Nine answers in ten are short, every request asks for the same most, and nobody but the bench knows where it will stop;
the prompts carry words that mostly tell. The ranker has learned from 500 other requests of the same kind, which were
served first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from headway.backends.cpu import load_model
from headway.bench.live import Live, random_prompt
from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.rounds import Rounds, ratio
from headway.bench.setup import ModelSetup
from headway.bench.virtual import BenchRun, Job
from headway.config import EngineConfig
from headway.engine.ranked import Forecast
from headway.rank.online import Ranker

SLOTS = 8
PROMPT, SHORT, LONG = 30, 10, 400
COMPLETIONS = 500
WORDS = {SHORT: range(5000, 5008), LONG: range(6000, 6008)}
HINTS, TRUE = 3, 0.9  # words in a prompt, and how many of them tell the truth


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """Of one run."""

    tokens_per_s: float
    mean: float
    p99: float

    @staticmethod
    def of(run: BenchRun) -> OrderTimes:
        totals = [record.total for record in run.records]
        return OrderTimes(run.tokens_per_s, workloads.mean(totals), workloads.quantile(totals, 0.99))


def order(setup: ModelSetup, seed: int, rounds: int, count: int = 320) -> Iterator[Claim]:
    """Throughput and waiting against a static batch, and what knowing lengths is worth."""
    jobs = _jobs(seed, count)
    configs = _configs(setup, count)
    loaded = load_model(configs["fcfs"])
    live = Live(loaded, Prompts(seed, loaded.spec.vocab_size))
    with closing(Forecast(Ranker())) as forecast:
        _teach(forecast, live, configs["ltr"], seed)
        oracle = [replace(job, expected=float(job.num_output)) for job in jobs]
        kinds = {name: oracle if name == "sjf, told" else jobs for name in configs}
        runs: Rounds[OrderTimes] = Rounds(configs)
        for name in runs.turns(rounds):
            forecasts = forecast if name == "ltr" else None
            runs.add(name, OrderTimes.of(live.serve(kinds[name], configs[name], forecasts)))
    yield from _claims(runs)


def _claims(runs: Rounds[OrderTimes]) -> Iterator[Claim]:
    fcfs, static = runs["fcfs"], runs["static"]
    faster = ratio(fcfs, static, lambda times: times.tokens_per_s)
    yield Claim("order", "continuous over static batches of 8: throughput", faster, least=2.5)
    sooner = ratio(static, fcfs, lambda times: times.mean)
    yield Claim("order", "static batches of 8 over continuous: mean end to end", sooner, least=3.0)
    for name, least in (("ltr", 1.4), ("sjf, told", 1.8)):
        sooner = ratio(fcfs, runs[name], lambda times: times.mean)
        yield Claim("order", f"fcfs over {name}: mean end to end", sooner, least=least)
        tail = ratio(runs[name], fcfs, lambda times: times.p99)
        yield Claim("order", f"{name} over fcfs: P99", tail, most=1.15)


def _jobs(seed: int, count: int) -> list[Job]:
    answers = [LONG] * round(count / 10) + [SHORT] * (count - round(count / 10))
    random.Random(seed).shuffle(answers)
    return [Job(0.0, PROMPT, answer, max_tokens=LONG) for answer in answers]


def _configs(setup: ModelSetup, count: int) -> Mapping[str, EngineConfig]:
    blocks = -(-(PROMPT + LONG) // 16)
    base = {
        "max_num_seqs": SLOTS, "max_num_batched_tokens": 512, "num_blocks": SLOTS * blocks * 102 // 100 + 4,
        "prefix_caching": False, "touch_kv": True, "max_waiting": count,
    }  # fmt: skip
    setup = replace(setup, dtype=setup.dtype or "float32")
    return {
        "static": setup.config(**base, batching=f"static:{SLOTS}"),
        "fcfs": setup.config(**base),
        "ltr": setup.config(**base, policy="ltr"),
        "sjf, told": setup.config(**base, policy="sjf"),
    }


class Prompts:
    """Random tokens, some of them replaced by words that go with the answer's length."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed = seed
        self._plain = random_prompt(seed, vocab)
        self._vocab = vocab

    def __call__(self, id: int, job: Job) -> list[int]:
        tokens, rng = self._plain(id, job), random.Random(f"words {self._seed}:{id}")
        if job.num_output not in WORDS:
            return tokens
        for _ in range(HINTS):
            said = job.num_output if rng.random() < TRUE else SHORT + LONG - job.num_output
            tokens[rng.randrange(len(tokens))] = rng.choice(WORDS[said]) % self._vocab
        return tokens


def _teach(forecast: Forecast, live: Live, config: EngineConfig, seed: int) -> None:
    """Serve other jobs of the same kind, and let the ranker learn from how they ended.

    What is measured afterwards teaches it nothing: every round has the same prompts, and the second would know them.
    """
    earlier = replace(live, prompt=Prompts(seed + 1, live.loaded.spec.vocab_size))
    config = replace(config, scheduler=replace(config.scheduler, max_waiting=COMPLETIONS))
    run = earlier.serve(_jobs(seed + 1, COMPLETIONS), config, forecast)
    for id, record in enumerate(run.records):
        forecast.end(id, record.num_tokens, record.finish)
    forecast.settle()
