"""sjf, ltr and srpt: least cost first, a share for the oldest, and preemption only where it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from headway.bench.virtual import A100, EngineSetup, Job, simulate
from headway.control.costs import CostModel
from headway.core.policy import Policy, PolicyContext
from headway.core.request import Request
from headway.policies.hrrn import HighestRatioNext
from headway.policies.ltr import LearnedRank
from headway.policies.sjf import ShortestJobFirst
from headway.policies.slo import SloAware
from headway.policies.srpt import ShortestRemaining
from headway.values.limits import Limits
from headway.values.params import SamplingParams, Slo
from served import order, serve

SHORT, LONG = Job(0.0, 10, 4, expected=4.0), Job(0.0, 10, 200, expected=200.0)


def test_the_cost_of_the_whole_request_counts_not_the_answer_alone() -> None:
    long_prompt, long_answer = Job(0.0, 3000, 4, expected=4.0), Job(0.0, 10, 15, expected=15.0)
    assert order([long_prompt, long_answer, SHORT], ShortestJobFirst) == [2, 1, 0]


def test_what_is_predicted_orders_not_what_comes() -> None:
    misjudged = Job(0.0, 10, 200, max_tokens=300, expected=2.0)
    assert order([SHORT, misjudged], ShortestJobFirst) == [1, 0]


def test_ltr_orders_as_sjf_does_and_asks_for_a_ranker() -> None:
    assert order([LONG, SHORT], LearnedRank) == [1, 0]
    assert LearnedRank.learns


def test_every_tenth_admission_takes_the_oldest() -> None:
    jobs = [LONG] + [SHORT] * 30
    assert order(jobs, ShortestJobFirst).index(0) == 9
    assert order(jobs, lambda: ShortestJobFirst(share_every=4)).index(0) == 3
    assert order(jobs, lambda: ShortestJobFirst(share_every=0)).index(0) == 30


def test_the_oldest_is_not_passed_over_when_its_turn_comes_and_memory_is_short() -> None:
    # Twelve blocks: the large one needs ten, the small ones two each and would always leave too few.
    large = Job(0.0005, 150, 4, expected=4.0)
    small = [Job(0.0 if i < 6 else 0.001, 20, 6 + i % 7, expected=6.0) for i in range(120)]
    records = serve([large, *small], ShortestJobFirst, slots=6, num_blocks=12).records
    oldest = next(record for record in records if record.job is large)
    started_before = sum(record.first < oldest.first for record in records)
    assert 6 <= started_before < 30, f"{started_before} small ones went before the oldest"


def test_aging_is_arrival_in_the_key() -> None:
    jobs = [LONG, Job(1.0, 10, 4, expected=4.0), Job(60.0, 10, 4, expected=4.0)]
    blocker = Job(0.0, 10, 3000, max_tokens=3000, expected=0.001)
    assert order([blocker, *jobs], ShortestJobFirst) == [0, 2, 3, 1]
    assert order([blocker, *jobs], lambda: ShortestJobFirst(aging=0.5)) == [0, 2, 1, 3]


def test_boost_puts_a_request_that_waited_long_enough_first() -> None:
    blocker = Job(0.0, 10, 1000, expected=0.001)
    jobs = [blocker, LONG, *[SHORT] * 5]
    assert order(jobs, lambda: ShortestJobFirst(share_every=0, boost_after=1e6)).index(1) == 6
    assert order(jobs, lambda: ShortestJobFirst(share_every=0, boost_after=1.0)).index(1) == 1


def test_srpt_preempts_the_request_with_most_left() -> None:
    short = Job(1.0, 10, 4, expected=4.0)
    run = serve([Job(0.0, 10, 400, expected=400.0), short], ShortestRemaining)
    assert run.records[1].end < run.records[0].end
    assert run.preemptions == 1
    assert run.records[0].num_tokens == 400


def test_srpt_preempts_nothing_nearly_done_or_without_gain() -> None:
    short = Job(7.5, 10, 4, expected=4.0)  # by then the first has some 330 of its 400 tokens
    assert serve([Job(0.0, 10, 400, expected=400.0), short], ShortestRemaining).preemptions == 0
    similar = Job(1.0, 10, 300, expected=300.0)
    assert serve([Job(0.0, 10, 400, expected=400.0), similar], ShortestRemaining).preemptions == 0
    # 8,000 tokens to compute again cost more than the short one gains.
    heavy = Job(0.0, 8000, 60, expected=60.0)
    assert serve([heavy, Job(2.3, 10, 4, expected=4.0)], ShortestRemaining).preemptions == 0


QUIET = [Job(2.0 * i, 40, 16, expected=16.0) for i in range(300)]  # one at a time
BURST = [Job(600.0, 40, 16, expected=16.0)] * 100
BUSY = [Job(600.0 + 0.03 * i, 40, 16, expected=16.0) for i in range(1, 500)]  # about a tenth more than can be served


@pytest.mark.parametrize("policy", [ShortestJobFirst, LearnedRank, ShortestRemaining, HighestRatioNext, SloAware])
@pytest.mark.parametrize("jobs", [QUIET + BURST + BUSY, BURST + BUSY], ids=["after quiet", "while it learns"])
def test_identical_requests_are_served_in_order_of_arrival(policy: Callable[[], Policy], jobs: list[Job]) -> None:
    # What a step costs is learned meanwhile, and a row's part in it falls as rows are added.
    if policy is SloAware:
        jobs = [replace(job, slo=Slo(ttft=60.0)) for job in jobs]
    setup = EngineSetup(policy, Limits(16, 256), learns_costs=True)
    firsts = [record.first for record in simulate(jobs, setup).records]
    assert firsts == sorted(firsts)


def test_a_turn_of_the_oldest_is_repaid_in_the_unit_it_was_counted_in() -> None:
    costs = CostModel()
    policy = ShortestJobFirst()
    policy.attach(PolicyContext(costs))
    queue, ids = policy.queue(), count()

    def admit_until_a_turn() -> int:
        for num_admitted in range(5000):
            if queue.forbids_backfill(0.0):
                queue.admit(queue.peek(0.0))
                return num_admitted
            queue.push(Request(next(ids), [1] * 200, SamplingParams(max_tokens=200)))
            queue.admit(queue.peek(0.0))
        raise AssertionError("the oldest has no turn")

    for _ in range(20):
        queue.push(Request(next(ids), [1] * 200, SamplingParams(max_tokens=200)))
    assert admit_until_a_turn() == 9
    costs.weights, costs.is_ready = A100, True  # as after 32 steps
    assert admit_until_a_turn() <= 12
    assert admit_until_a_turn() <= 12
