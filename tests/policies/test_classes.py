"""priority and mlfq: which requests preempt which, and which never do."""

from __future__ import annotations

from headway.bench.virtual import Job
from headway.policies.mlfq import MultiLevelFeedback
from headway.policies.priority import Priority
from served import order, serve


def _job(at: float, priority: int, num_output: int = 50) -> Job:
    return Job(at, 16, num_output, priority=priority)


def test_a_smaller_number_goes_first_then_arrival() -> None:
    assert order([_job(0.0, 1), _job(0.0, 2), _job(0.0, 0), _job(0.0, 1)], Priority) == [2, 0, 3, 1]


def test_an_urgent_one_takes_a_slot_at_once() -> None:
    run = serve([_job(0.0, 1), _job(0.0, 1), _job(0.5, 0)], Priority, slots=2)
    urgent = run.records[2].output
    assert urgent is not None
    assert urgent.timing is not None
    assert urgent.timing.queued_s == 0.0
    assert run.preemptions == 1


def test_the_least_urgent_class_gives_way() -> None:
    run = serve([_job(0.0, 1), _job(0.0, 2), _job(0.5, 0)], Priority, slots=2)
    assert [record.output.preemptions for record in run.records if record.output] == [0, 1, 0]


def test_equals_never_preempt_each_other() -> None:
    jobs = [_job(0.1 * i, 1) for i in range(30)]
    assert serve(jobs, Priority, slots=3).preemptions == 0


def test_the_less_urgent_leave_a_tenth_of_the_memory_free() -> None:
    # Twenty blocks, each needs five: without the rule four would be admitted, with it three.
    jobs = [Job(0.0, 70, 8, priority=1) for _ in range(4)]
    firsts = sorted(record.first for record in serve(jobs, Priority, slots=4, num_blocks=20).records)
    assert firsts[2] < firsts[3]
    urgent = [Job(0.0, 70, 8, priority=0) for _ in range(4)]
    firsts = sorted(record.first for record in serve(urgent, Priority, slots=4, num_blocks=20).records)
    assert firsts[0] == firsts[3]


def test_preempted_requests_resume_before_others_of_their_class() -> None:
    jobs = [_job(0.0, 1, 200), _job(0.1, 1, 20), _job(0.5, 0, 20)]
    records = serve(jobs, Priority).records
    assert records[0].output is not None
    assert records[0].output.preemptions == 1
    assert records[0].end < records[1].first


def test_mlfq_lets_a_newcomer_go_before_one_that_used_its_quantum() -> None:
    jobs = [Job(0.0, 10, 600), Job(2.0, 10, 5)]
    run = serve(jobs, lambda: MultiLevelFeedback(quantum=0.5))
    assert run.preemptions == 1
    assert run.records[1].end < run.records[0].end


def test_mlfq_places_a_request_by_the_cost_of_its_prompt() -> None:
    blocker, heavy, light = Job(0.0, 10, 2), Job(0.0, 4000, 2), Job(0.0, 10, 2)
    assert order([blocker, heavy, light], MultiLevelFeedback) == [0, 2, 1]


def test_mlfq_promotes_a_request_that_has_waited_long() -> None:
    light = [Job(0.2 * i, 10, 12) for i in range(100)]
    jobs = sorted([Job(0.01, 4000, 2), *light], key=lambda job: job.at)
    patient = order(jobs, lambda: MultiLevelFeedback(promote_after=3.0)).index(1)
    starved = order(jobs, lambda: MultiLevelFeedback(promote_after=1e6)).index(1)
    assert patient < 30 < starved


def test_mlfq_preempts_no_request_when_that_costs_more_than_it_gains() -> None:
    heavy = Job(0.0, 6000, 40)
    assert serve([heavy, Job(1.4, 10, 5)], lambda: MultiLevelFeedback(quantum=0.05)).preemptions == 0
