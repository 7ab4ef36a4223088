"""The decision journal: parts add up to the total, reasons are those of the plans, costs those of the steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headway.bench.virtual import UNIT, BenchRun, EngineSetup, Job, World, drive
from headway.control.gates import BatchGate
from headway.core.policy import Policy
from headway.engine import decisions
from headway.engine.decisions import DecisionJournal
from headway.engine.explain import Explanation
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.slo import SloAware
from headway.values.events import Admitted, Event, Finished, FirstToken, Preempted, PreemptReason, Queued
from headway.values.limits import Limits
from headway.values.params import Slo
from headway.values.states import Waited, WaitReason


def loaded_run(
    count: int, policy: Callable[[], Policy] = FirstComeFirstServed, seed: int = 0, **options: object
) -> tuple[World, BenchRun]:
    """More work than rows, tokens and blocks allow, with a journal that sees everything."""
    rng = random.Random(seed)
    jobs = [
        Job(
            at=rng.expovariate(1) * 0.02 * i,
            num_prompt=rng.choice((16, 200, 900)),
            num_output=rng.randint(1, 120),
            num_shared=rng.choice((0, 128)) if options.get("caches") else 0,
            family=i % 3,
        )
        for i in range(count)
    ]
    jobs = [job if job.num_shared < job.num_prompt else job.__class__(job.at, 900, job.num_output) for job in jobs]
    setup = EngineSetup(policy=policy, limits=Limits(8, 256), num_blocks=220, **options)  # type: ignore[arg-type]
    world = World(setup)
    world.metrics.journal = DecisionJournal(world.costs)
    return world, drive(world, jobs)


def explanations(world: World, run: BenchRun) -> list[Explanation]:
    journal = world.metrics.journal
    assert journal is not None
    found = [journal.explain(id, world.clock.now()) for id in range(len(run.records))]
    assert None not in found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("policy", [FirstComeFirstServed, SloAware])
def test_the_parts_of_a_request_add_up_to_its_total(policy: Callable[[], Policy], caches: bool) -> None:
    world, run = loaded_run(120, policy, caches=caches)
    told = explanations(world, run)
    assert any(each.preemptions for each in told) or policy is SloAware, "the run must preempt"
    for each, record in zip(told, run.records, strict=True):
        assert record.output is not None
        assert record.output.timing is not None
        assert each.state == "done"
        assert sum(each.parts_s.values()) == pytest.approx(record.output.timing.total_s, abs=1e-9)
        assert min(each.parts_s.values()) >= 0.0
        assert sum(wait.seconds for wait in each.waits) == pytest.approx(
            record.output.timing.queued_s + record.output.timing.preempted_s, abs=1e-9
        )


def test_waiting_for_the_step_under_way_never_lasts_longer_than_a_step() -> None:
    """What no reason accounts for is bounded, else the remainder would hide whatever the reasons miss."""
    world, run = loaded_run(120)
    longest = max(step.seconds for step in run.steps)
    for each in explanations(world, run):
        assert each.parts_s.get("step", 0.0) <= longest * (1 + len(each.preemptions)) + 1e-9


def test_every_second_of_the_device_is_some_requests_share() -> None:
    world, run = loaded_run(60)
    shares = sum(each.device_s for each in explanations(world, run))
    assert shares == pytest.approx(sum(step.seconds for step in run.steps), rel=1e-6)


def test_an_ended_answer_of_a_static_batch_uses_no_more_steps() -> None:
    world = World(EngineSetup(Policy, Limits(2, 64), UNIT, 4096, lambda: BatchGate(2)))
    world.metrics.journal = DecisionJournal(world.costs)
    run = drive(world, [Job(0.0, 1, 2), Job(0.0, 1, 60), Job(0.0, 1, 1), Job(0.0, 1, 1)])
    outputs = [record.output for record in run.records if record.output]
    assert [output.device_s for output in outputs] == [1.0, 59.0, 0.5, 0.5]
    assert sum(output.device_s for output in outputs) == sum(step.seconds for step in run.steps)


PAUSES = ((WaitReason.PAUSED, Waited(1, 2.0)),)


def _told(*events: Event) -> Explanation:
    journal = DecisionJournal()
    for event in (Queued(0, 0.0, 9), *events):
        journal.emit(event)
    told = journal.explain(0, events[-1].now)
    assert told is not None
    assert sum(told.parts_s.values()) == told.total_s
    return told


def test_a_pause_before_the_first_token_came_is_no_prefill() -> None:
    first = Admitted(0, 0, 1.0, 0, is_resumed=False), FirstToken(0, 3, 6.0)
    told = _told(*first, Finished(0, 6.0, "length", 9, 2, 0, 0, PAUSES))
    assert told.parts_s == {"step": 1.0, "prefill": 3.0, "paused": 2.0, "decode": 0.0}
    told = _told(*first, Finished(0, 7.5, "length", 9, 2, 0, 0, PAUSES))
    assert told.parts_s == {"step": 1.0, "prefill": 4.5, "paused": 2.0, "decode": 0.0}


def test_a_pause_before_the_first_token_of_a_row_that_was_lost_is_no_decoding() -> None:
    lost = Preempted(0, 3, 6.0, 9, is_swapped=False, reason=PreemptReason.MEMORY)
    told = _told(Admitted(0, 0, 1.0, 0, is_resumed=False), lost, Admitted(0, 4, 7.0, 0, True, False, 0, PAUSES))
    assert told.parts_s == {"step": 2.0, "prefill": 3.0, "paused": 2.0}


def test_chunks_cover_the_prompt_and_preemptions_name_their_cost() -> None:
    world, run = loaded_run(120)
    for each, record in zip(explanations(world, run), run.records, strict=True):
        assert record.output is not None
        assert each.num_chunks == len(each.chunks)
        if not each.preemptions:
            assert sum(chunk.count for chunk in each.chunks) == record.job.num_prompt - each.num_cached
            assert [chunk.start for chunk in each.chunks] == sorted(chunk.start for chunk in each.chunks)
        assert len(each.preemptions) == record.output.preemptions
        for note in each.preemptions:
            assert note.waited_s > 0.0
        assert each.kv_block_s >= record.job.num_prompt // 16 * each.parts_s.get("decode", 0.0)


def test_what_ran_meanwhile_is_what_the_steps_did() -> None:
    world, run = loaded_run(60)
    waits = [wait for each in explanations(world, run) for wait in each.waits if wait.meanwhile.steps > 3]
    assert waits
    assert all(0 < wait.meanwhile.running <= 8 for wait in waits)
    assert all(wait.meanwhile.prompt_tokens + wait.meanwhile.generated_tokens > 0 for wait in waits)


def test_the_journal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MOST_ENDED", 10)
    world, run = loaded_run(40)
    journal = world.metrics.journal
    assert journal is not None
    known = [id for id in range(40) if journal.explain(id, 0.0) is not None]
    assert len(known) == 10
    assert not journal._live
    assert not journal._in_flight
    assert len(run.records) == 40


def test_a_request_under_way_is_explained_too() -> None:
    world, _ = loaded_run(0)
    journal = world.metrics.journal
    assert journal is not None
    for id in range(12):
        world.submit(id, Job(at=0.0, num_prompt=200, num_output=50, slo=Slo(itl=5.0)))
    world.engine.step()
    told = [journal.explain(id, world.clock.now()) for id in range(12)]
    states = [each.state for each in told if each is not None]
    assert states.count("running") >= 1
    assert states.count("waiting") >= 1
    for each in told:
        assert each is not None
        assert sum(each.parts_s.values()) == pytest.approx(each.total_s)
    assert journal.explain(99, 0.0) is None
