"""The production engine over a real model, by the machine's clock: jobs arrive at their times and end at their lengths.

A job ends by a stop token that only the bench knows: the executor emits it when the answer has the job's length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace

from headway.backends.cpu import LoadedCpu
from headway.bench.virtual import BenchRun, Job, drive
from headway.build import build_engine
from headway.config import EngineConfig
from headway.engine.executor import Capacity, Executor, Late
from headway.engine.garbage import settle_garbage
from headway.engine.ranked import Forecast
from headway.engine.stops import StopCalendar
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan, StepResult

_FIRST_PLAIN_TOKEN = 20  # below are the special tokens of the embedded model
WARM_UP = 8  # requests


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def advance(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))  # the awaited time may have passed meanwhile


class StoppingExecutor:
    """Wraps an executor and adds stop tokens that the model does not produce."""

    def __init__(self, inner: Executor, stop_after: dict[int, int]) -> None:
        self._inner = inner
        self._calendar = StopCalendar(stop_after)
        self._stopped: dict[int, list[int]] = {}  # plan -> rows that end in it
        self.last_was_mixed = False

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def submit(self, plan: StepPlan) -> None:
        self._stopped[plan.id] = self._calendar.rows(plan)
        self.last_was_mixed = bool(plan.chunks)
        self._inner.submit(plan)

    def supply(self, plan_id: int, late: Late) -> None:
        self._inner.supply(plan_id, late)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        stopped = self._stopped.pop(result.plan_id)
        return replace(result, stopped=stopped) if stopped else result

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class Live:
    """What every run of a comparison shares; `prompt` makes a job's tokens from its number."""

    loaded: LoadedCpu
    prompt: Callable[[int, Job], list[int]]

    def serve(self, jobs: Iterable[Job], config: EngineConfig, forecast: Forecast | None = None) -> BenchRun:
        """An engine of its own for these jobs; nothing of one run is left for the next but touched pages."""
        world = LiveWorld(self, config, forecast)
        with closing(world.engine):
            world.warm_up()
            settle_garbage()
            world.clock = WallClock()
            return drive(world, jobs)


class LiveWorld:
    """One engine and the machine's clock."""

    def __init__(self, live: Live, config: EngineConfig, forecast: Forecast | None = None) -> None:
        self.clock = WallClock()
        self._live = live
        self._forecast = forecast
        self._stops: dict[int, int] = {}
        # A job's end is set by the number of its steps: none may give it several tokens.
        config = replace(config, scheduler=replace(config.scheduler, speculation="off", draft_model=None))
        self.engine = build_engine(config, live.loaded, around=self._wrap)

    def _wrap(self, inner: Executor) -> Executor:
        self._executor = StoppingExecutor(inner, self._stops)
        return self._executor

    @property
    def last_was_mixed(self) -> bool:
        return self._executor.last_was_mixed

    def warm_up(self) -> None:
        """Start threads, fill caches and let the engine learn step costs, with ids that no job has."""
        for number in range(WARM_UP):
            self._send(-1 - number, Job(0.0, 64, 32))
        while self.engine.has_work:
            self.engine.step()

    def submit(self, id: int, job: Job) -> float | None:
        self._send(id, job)
        return None

    def _send(self, id: int, job: Job) -> None:
        self._stops[id] = job.num_output
        params = SamplingParams(max_tokens=job.max_tokens or job.num_output, temperature=0, ignore_eos=True)
        submit = job.submit(id, self._live.prompt(id, job), params)
        self.engine.add(submit if self._forecast is None else self._forecast.predict(submit))


def random_prompt(seed: int, vocab: int) -> Callable[[int, Job], list[int]]:
    """Prompts of random tokens: equal seeds and numbers, equal prompts."""

    def prompt(id: int, job: Job) -> list[int]:
        rng = random.Random(f"{seed}:{id}")
        return [rng.randrange(_FIRST_PLAIN_TOKEN, vocab) for _ in range(job.num_prompt)]

    return prompt
