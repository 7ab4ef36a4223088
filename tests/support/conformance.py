"""What every policy must keep, whatever it prefers. A check takes any policy and fails by AssertionError.

It knows no policy by name: `variants` says how one can stand, by itself or within shares, and `CHECKS` what is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from headway.bench.virtual import A100, BenchRun, EngineSetup, Job, World
from headway.config import SchedulerConfig
from headway.control.costs import CostModel
from headway.core.policy import Key, Policy, PolicyContext
from headway.core.request import Request
from headway.policies._build import build_policy
from headway.values.limits import Limits
from headway.values.params import NO_SLO, SamplingParams, Slo
from rig import Rig
from scenario import run_scenario
from served import serve

Make = Callable[[], Policy]

LANES = "fast=3,slow=1"
SHARES: tuple[dict[str, Any], ...] = ({"fair": True}, {"lanes": LANES}, {"fair": True, "lanes": LANES})
PATIENT = Slo(ttft=5000.0, itl=100.0, deadline=50_000.0)
NUM_SCENARIOS = 60
MOST_PREEMPTED = 3


def variants(name: str) -> dict[str, Make]:
    """The ways in which the policy of this name, ours or my.module:Thing, can stand."""
    makes = {name: maker(name)}
    if not makes[name]().is_global_order:
        makes |= {f"{name} within {' and '.join(shares)}": maker(name, **shares) for shares in SHARES}
    return makes


def maker(name: str, **fields: Any) -> Make:
    return lambda: build_policy(SchedulerConfig(policy=name, **fields))


def check_orders_are_total(make: Make) -> None:
    """Any two requests compare, in every order there is, and one request is as large as itself."""
    for context in (PolicyContext(), PolicyContext(CostModel(A100), num_computed=lambda req: len(req.tokens))):
        policy = make()
        policy.attach(context)
        queue = policy.queue()
        requests = list(_all_sorts())
        for order in (policy.key, policy.victim_key, policy.priority_victim_key):
            _check_keys({req.id: order(req) for req in requests}, order.__name__)
        assert all(isinstance(policy.rank(req), int) for req in requests), "rank must be a whole number"
        for req in requests:
            queue.push(req)
        left = {req.id for req in requests}
        while (head := queue.peek(1000.0)) is not None:
            assert head.id in left, f"the queue hands out request {head.id} twice"
            left.discard(head.id)
            queue.admit(head)
        assert not left, f"the queue never hands out {sorted(left)}"


def _all_sorts() -> Iterator[Request]:
    for id in range(24):
        req = Request(
            id,
            [1] * (1 + id * 7 % 5 * 40),
            SamplingParams(max_tokens=50),
            arrival=id * 0.5,
            priority=id % 3 - 1,
            tenant=("", "ann", "bob")[id % 3],
            lane=("", "fast", "slow")[id % 4 % 3],
            slo=(NO_SLO, PATIENT, Slo(ttft=3.0), Slo(deadline=9.0))[id % 4],
            expected=float(id % 6 * 9),
        )
        req.tokens += [2] * (id % 4 * 5)
        yield req


def _check_keys(keys: Mapping[int, Key], what: str) -> None:
    for key in keys.values():
        assert isinstance(key, tuple), f"{what} gave {key!r}; it must be a tuple of numbers"
        is_number = [isinstance(part, int | float) and not math.isnan(part) for part in key]
        assert all(is_number), f"{what} gave {key!r}; each part must be a number"
    assert len({len(key) for key in keys.values()}) == 1, f"{what} gave keys of several lengths: {keys}"


def check_keys_stay(make: Make) -> None:
    """Time passes, others are served, and whoever waits keeps its key: the queue asked for it once."""
    world = World(EngineSetup(make, Limits(3, 256)))
    policy, seen = world.scheduler.state.policy, {}
    policy.context.costs = CostModel(A100)  # one that learns nothing meanwhile
    for _ in _serve_all(world, _mixed_jobs()):
        for req in world.scheduler.state.waiting.queue.requests():
            key = policy.key(req)
            before = seen.setdefault((req.id, req.num_preempted), key)
            assert key == before, f"the key of request {req.id} was {before} and is {key} while it waits"
    assert seen, "nobody ever waited"


def _serve_all(world: World, jobs: list[Job]) -> Iterator[float]:
    """Steps until all is done; the virtual time after each."""
    coming = 0
    while coming < len(jobs) or world.engine.has_work:
        while coming < len(jobs) and jobs[coming].at <= world.clock.now():
            world.submit(coming, jobs[coming])
            coming += 1
        if world.engine.step().idle_s is not None:
            world.clock.advance(1e-2)
        yield world.clock.now()


def _mixed_jobs(count: int = 60) -> list[Job]:
    return [
        Job(
            at=0.05 * i,
            num_prompt=5 + i * 37 % 200,
            num_output=1 + i * 29 % 40,
            max_tokens=45,
            tenant=("ann", "bob", "")[i % 3],
            lane=("fast", "slow")[i % 2],
            priority=i % 4,
            slo=PATIENT if i % 3 else NO_SLO,
            expected=1.0 + i * 29 % 40,
        )
        for i in range(count)
    ]


def check_equal_loads_are_served_equally(make: Make) -> None:
    """No chance is involved, and those who differ in arrival alone start in that order if the policy keeps it."""
    one, other = (serve(_mixed_jobs(), make, slots=3) for _ in range(2))
    assert _times(one) == _times(other), "two runs of one load differ"
    if not make().keeps_arrival_order:
        return
    alike = [Job(0.001 * i, 20, 8, tenant="ann", lane="fast", slo=PATIENT, expected=8.0) for i in range(30)]
    firsts = [record.first for record in serve(alike, make, slots=2).records]
    late = [i for i, (before, after) in enumerate(pairwise(firsts), 1) if after < before]
    assert not late, f"requests {late} started before older ones that are like them in everything else"


def _times(run: BenchRun) -> list[tuple[float, float]]:
    return [(record.first, record.end) for record in run.records]


def check_slots_are_not_kept_empty(make: Make) -> None:
    """Where nobody asks for anything in particular, all the work takes about as long as it does in order of arrival."""
    jobs = [Job(0.0, 20, 40, lane="fast", expected=40.0) for _ in range(40)]
    took, usual = (serve(jobs, order, slots=8).makespan for order in (make, Policy))
    assert took <= 1.25 * usual, f"40 equal requests take {took:.1f} s instead of {usual:.1f} s"


def check_everybody_ends(make: Make) -> None:
    """With little memory: one end for each, a whole answer unless it is shed, and few preemptions."""
    for record in serve(_mixed_jobs(), make, slots=6, num_blocks=40).records:
        assert record.output is not None, f"{record.job} never ended"
        if record.finish == "shed":
            assert record.num_tokens == 0, f"{record.job} was shed after {record.num_tokens} tokens"
        else:
            assert (record.finish, record.num_tokens) == ("stop", record.job.num_output), (
                f"{record.job} ended as {record.finish}"
            )
        assert record.output.preemptions <= MOST_PREEMPTED, (
            f"{record.job} was preempted {record.output.preemptions} times"
        )


def check_nobody_starves(make: Make) -> None:
    """A request unlike the others begins while a fifth more of them come than can be served, and is finished."""
    short, long_prompt = {"num_prompt": 16, "num_output": 8}, {"num_prompt": 900, "num_output": 8}
    # Four times the cost, not more: to wait in proportion to it, as hrrn makes one, is not to starve.
    long_answer, long = {"num_prompt": 16, "num_output": 30}, {"num_prompt": 400, "num_output": 60}
    for odd, usual in ((long_prompt, short), (long_answer, short), (short, long)):
        apart, count = (0.041, 500) if usual is short else (0.36, 120)
        stream = [_one_of(usual, apart * i) for i in range(count)]
        place = count // 5  # by then the queue has grown, and what steps cost is known
        jobs = [*stream[:place], _one_of(odd, stream[place].at), *stream[place:]]
        record = serve(jobs, make, slots=4).records[place]
        assert record.is_answered, f"{odd} got no answer"
        last = stream[-1].at
        assert record.first < last, f"{odd} waits {record.ttft:.0f} s among {usual}: until nobody else comes any more"


def _one_of(lengths: Mapping[str, int], at: float) -> Job:
    return Job(at, **lengths, lane="fast", tenant="ann", expected=float(lengths["num_output"]))


def check_answers_are_those_of_fcfs(make: Make) -> None:
    """The same requests get the same tokens; and any scenario those that each would get alone."""
    answers = []
    for policy in (make(), Policy()):
        rig = Rig(num_blocks=12, rows=3, policy=policy)
        for i in range(20):
            intent = {"tenant": "ann" if i % 3 else "bob", "lane": ("fast", "slow")[i % 2], "priority": i % 3}
            rig.add([i % 4, 7, i % 5] * (1 + i % 3), 4 + i % 9, seed=i % 2, expected=float(i % 7), **intent)
        rig.drain()
        answers.append(rig.streams)
    assert answers[0] == answers[1], "answers differ from those of fcfs"
    for seed in range(NUM_SCENARIOS):
        try:
            run_scenario(seed, make())
        except AssertionError as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


CHECKS: dict[str, Callable[[Make], None]] = {
    "orders": check_orders_are_total,
    "keys": check_keys_stay,
    "equals": check_equal_loads_are_served_equally,
    "slots": check_slots_are_not_kept_empty,
    "ends": check_everybody_ends,
    "starvation": check_nobody_starves,
    "answers": check_answers_are_those_of_fcfs,
}
"""All of them, by a word for reports."""
