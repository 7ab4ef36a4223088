"""Check explanations: python tools/explain_check.py [--requests 1000] [--seed 0]

Runs the real scheduler, engine loop and decision journal on a virtual clock, under a load that exceeds slots, tokens,
KV blocks or what a cold prefix allows. Two things must hold for every request: the parts of its explanation add up to
the time that the engine measured, and its reasons are those that `Rebuilt` finds. That one sees nothing but arrivals
and the plans that were handed out, and shares no code with the scheduler. Prints a line per arm; status 1 if any
differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.bench.virtual import BLOCK, BenchRun, EngineSetup, Job, World, drive
from headway.engine.decisions import DecisionJournal
from headway.engine.explain import STEP
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Admission, Limits, PrefillOrder
from headway.values.plan import StepPlan

CLOSE = 1e-6  # seconds; sums of floats
PATIENCE = 4  # steps


class Arm(NamedTuple):
    """One way to be short of something."""

    name: str
    limits: Limits
    num_blocks: int
    prompts: tuple[int, ...]
    most_output: int
    num_shared: int = 0
    every_s: float = 0.02


ARMS = (
    Arm("slots", Limits(8, 512), 4000, (16, 200, 700), 120),
    Arm("tokens", Limits(64, 96, partial=2), 4000, (300, 900), 40),
    Arm("blocks", Limits(64, 512, admission=Admission.RESERVE), 200, (100, 600), 200),
    Arm(
        "prefix", Limits(12, 256, prefill=PrefillOrder.ARRIVAL), 40_000, (1100, 1300), 60, num_shared=1024, every_s=0.01
    ),
)


@dataclass(slots=True)
class _Row:
    """What plans say about a request in a row."""

    id: int
    known: int  # tokens
    scheduled: int


@dataclass(slots=True)
class Rebuilt:
    """Reasons and seconds of every request, from arrivals and plans alone."""

    arm: Arm
    jobs: Sequence[Job]  # by id
    arrivals: Sequence[float]
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    _rows: dict[int, _Row] = field(default_factory=dict)
    _step: int = 0
    _arrived: list[int] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)  # have had a row
    _published: set[tuple[int, int]] = field(default_factory=set)  # family and number of a shared block
    _checks: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> step to look again, its blocks so far
    _stalled: set[int] = field(default_factory=set)  # computed nothing for `PATIENCE` steps: are not waited for

    def replay(self, calls: Sequence[tuple[float, StepPlan | None]]) -> None:
        for (now, plan), (until, _) in zip(calls, [*calls[1:], (calls[-1][0], None)], strict=True):
            waiting = self._apply(plan, now)
            self._look(plan)
            reason = self._reason(plan, waiting)
            for id, arrival in enumerate(self.arrivals):
                if id in self._gone or arrival >= until:
                    continue
                mine = "prefix" if self._is_blocked(id) else reason
                mine = mine or STEP
                spent = self.seconds.setdefault(id, {})
                spent[mine] = spent.get(mine, 0.0) + until - max(now, arrival)
            self._collect(plan)

    def _apply(self, plan: StepPlan | None, now: float) -> list[int]:
        """Rows leave and join; who waits then, in order of arrival."""
        if plan is not None:
            for row in plan.leaves:
                self._rows.pop(row, None)
            for join in plan.joins:
                self._rows[join.row] = _Row(join.id, len(join.tokens), join.start)
                self._gone.add(join.id)
        self._arrived = [id for id, arrival in enumerate(self.arrivals) if arrival <= now]
        return [id for id in self._arrived if id not in self._gone]

    def _reason(self, plan: StepPlan | None, waiting: Sequence[int]) -> str | None:
        """Why the first of those that wait was not admitted; None: nothing waits."""
        if not waiting:
            return None
        if len(self._rows) == self.arm.limits.rows:
            return "slots"
        free = [id for id in waiting if not self._is_blocked(id)]
        if not free:
            return "prefix"
        decode = set[int]() if plan is None else set(plan.decode)
        wanted = [row.known - row.scheduled for at, row in self._rows.items() if at not in decode]
        if len(wanted) >= self.arm.limits.partial and sum(wanted) >= self.arm.limits.tokens - len(decode):
            return "tokens"
        held = sum(self._most_blocks(row.id) for row in self._rows.values())
        if self._most_blocks(free[0]) > self.arm.num_blocks - held:
            return "blocks"
        return "none that the plans show"

    def _most_blocks(self, id: int) -> int:
        """Blocks that it may come to need: all are reserved in the arm that is short of them."""
        return -(-(self.jobs[id].num_prompt + self.jobs[id].num_output - 1) // BLOCK)

    def _is_blocked(self, id: int) -> bool:
        """A running row computes the first block of its shared prefix that is not there yet."""
        job, count = self.jobs[id], 0
        while count < job.num_shared // BLOCK and (job.family, count) in self._published:
            count += 1
        return count < job.num_shared // BLOCK and self._source(job) is not None

    def _source(self, job: Job) -> _Row | None:
        """The row that computes a family's prefix; of several the last to join."""
        for row in reversed(self._rows.values()):
            if self.jobs[row.id].family == job.family and job.num_shared and row.id not in self._stalled:
                return row
        return None

    def _look(self, plan: StepPlan | None) -> None:
        """A row that others wait for must compute a block in every `PATIENCE` steps."""
        step = self._step if plan is None else plan.id
        self._step = step + 1
        by_id = {row.id: row.scheduled // BLOCK for row in self._rows.values()}
        for id, (due, count) in list(self._checks.items()):
            if due <= step:
                del self._checks[id]
                if by_id.get(id, 0) > count:
                    self._checks[id] = step + PATIENCE, by_id[id]
                else:
                    self._stalled.add(id)
        for id in self._arrived:
            source = self._source(self.jobs[id]) if id not in self._gone and self._is_blocked(id) else None
            if source is not None and source.id not in self._checks:
                self._checks[source.id] = step + PATIENCE, by_id[source.id]

    def _collect(self, plan: StepPlan | None) -> None:
        """The step is over: what its chunks computed is there, and rows have one token more."""
        if plan is None:
            return
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            row.scheduled = chunk.start + chunk.count
            row.known += bool(chunk.samples)
            job = self.jobs[row.id]
            done = min(row.scheduled, job.num_shared) // BLOCK
            self._published |= {(job.family, number) for number in range(done)}
        for at in plan.decode:
            self._rows[at].scheduled += 1
            self._rows[at].known += 1


def run_arm(arm: Arm, count: int, seed: int) -> tuple[World, BenchRun, list[tuple[float, StepPlan | None]]]:
    rng, at, jobs = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(1 / arm.every_s)
        prompt, output = rng.choice(arm.prompts), rng.randint(1, arm.most_output)
        jobs.append(Job(at, prompt, output, family=number // 40, num_shared=arm.num_shared))
    policy = FirstComeFirstServed
    world = World(EngineSetup(policy, arm.limits, num_blocks=arm.num_blocks, caches=arm.num_shared > 0))
    world.metrics.journal = DecisionJournal(world.costs)
    calls: list[tuple[float, StepPlan | None]] = []
    schedule = world.scheduler.schedule

    def noted(now: float) -> StepPlan | None:
        plan = schedule(now)
        calls.append((now, plan))
        return plan

    world.scheduler.schedule = noted  # type: ignore[method-assign]
    return world, drive(world, jobs), calls


def check(arm: Arm, count: int, seed: int) -> tuple[str, int]:
    """A line of the table, and how many requests differ."""
    world, run, calls = run_arm(arm, count, seed)
    jobs = [record.job for record in run.records]
    rebuilt = Rebuilt(arm, jobs, [record.taken for record in run.records])
    rebuilt.replay(calls)
    num_sums, num_reasons, told = 0, 0, dict[str, float]()
    journal = world.metrics.journal
    assert journal is not None
    for id, record in enumerate(run.records):
        explained = journal.explain(id, world.clock.now())
        assert explained is not None
        assert record.output is not None
        assert record.output.timing is not None
        total = record.output.timing.total_s
        num_sums += abs(sum(explained.parts_s.values()) - total) > 0.01 * total
        stated: dict[str, float] = {}
        for wait in explained.waits:
            for note in wait.reasons:
                stated[note.reason] = stated.get(note.reason, 0.0) + note.seconds
                told[note.reason] = told.get(note.reason, 0.0) + note.seconds
        expected = rebuilt.seconds.get(id, {})
        differ = [abs(stated.get(name, 0.0) - expected.get(name, 0.0)) > CLOSE for name in stated | expected]
        num_reasons += any(differ)
    shares = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(told.items(), key=lambda each: -each[1]))
    preempted = run.preemptions
    line = f"| {arm.name} | {count} | {num_sums} | {num_reasons} | {preempted} | {shares} |"
    return line, num_sums + num_reasons


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of all arms together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    print("| arm | requests | wrong sums | wrong reasons | preemptions | waited for |\n|---|---|---|---|---|---|")
    num_wrong = 0
    for arm in ARMS:
        line, wrong = check(arm, args.requests // len(ARMS), args.seed)
        print(line, flush=True)
        num_wrong += wrong
    print("all parts add up and all reasons are those of the plans" if not num_wrong else f"{num_wrong} differ")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
