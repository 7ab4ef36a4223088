"""`headway bench policy`: equal seeds print equal bytes, and a claim that does not hold is not passed over."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, pairwise

import pytest

from headway.bench.policy import declared, deep, run, workloads
from headway.bench.policy.bursts import most_on_time
from headway.bench.policy.claim import Claim
from headway.bench.scheduler import COMMON, CommonLoad, FullLoad, Load, build, measure
from headway.bench.virtual import EngineSetup, Job, simulate
from headway.core.policy import Policy
from headway.errors import ConfigError
from headway.policies._shared import Shared
from headway.policies.slo import SloAware
from headway.values.limits import Limits
from headway.values.params import Slo


@pytest.mark.parametrize("case", ["fixture", "preemption"])
def test_equal_seeds_print_equal_bytes_and_every_claim_holds(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert run.run([case], seed=3, as_json=True) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    assert f"{case} ..." in outputs[0].err
    last = json.loads(outputs[0].out.splitlines()[-1])
    assert last["seed"] == 3
    assert last["claims"]
    assert all(claim["holds"] for claim in last["claims"])


def test_what_requests_declare_hardly_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "DECLARED", {"100x": declared.DECLARED["100x"]})
    claims = list(declared.declared(seed=3))
    assert sum(1 for claim in claims if claim.bar) == 4 * 4
    assert not [claim for claim in claims if not claim.holds]


def test_depth_is_measured_with_a_common_prefix_and_short_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def note(kind: type[Load], policy: str, seed: int, when: str) -> bool:
        seen.add((kind, policy))
        return False

    monkeypatch.setattr(deep, "_is_slower", note)
    claims = list(islice(deep.deep(seed=0), 3))
    assert all(claim.holds for claim in claims)
    assert {(kind, policy) for kind in (Load, FullLoad, CommonLoad) for policy in ("lpm", "fcfs", "lanes")} <= seen


def test_another_seed_is_another_load(capsys: pytest.CaptureFixture[str]) -> None:
    printed = set()
    for seed in range(2):
        run.run(["preemption"], seed=seed)
        printed.add(capsys.readouterr().out)
    assert len(printed) == 2


def _one(value: float) -> run.Case:
    def case(seed: int) -> Iterator[Claim]:
        yield Claim("one", "something", value, most=1.0)

    return case


def test_a_claim_that_does_not_hold_is_printed_and_ends_with_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "CASES", {"good": _one(0.5), "bad": _one(1.5)})
    assert run.run(["good"]) == 0
    assert "FAILS" not in capsys.readouterr().out
    assert run.run() == 1
    printed = capsys.readouterr().out
    assert "FAILS" in printed
    assert "2 claims, 1 do not hold" in printed


def test_a_value_that_is_no_number_does_not_hold() -> None:
    nothing = float("nan")
    assert not Claim("x", "y", nothing, most=1.0).holds
    assert not Claim("x", "y", nothing, least=1.0).holds


@pytest.mark.parametrize(
    ("cases", "clock", "message"),
    [
        (["nonsense"], "virtual", "no case 'nonsense' by the virtual clock; there are: fixture, slots"),
        ([], "sundial", "clock is 'sundial'"),
    ],
)
def test_what_there_is_not_is_refused(cases: list[str], clock: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.run(cases, clock=clock)


def test_lengths_follow_the_quantiles_they_were_taken_from() -> None:
    rng = random.Random(1)
    prompts = [workloads.conversation(rng)[0] for _ in range(4000)]
    assert workloads.quantile(prompts, 0.5) == pytest.approx(1020, rel=0.1)
    assert workloads.quantile(prompts, 0.9) == pytest.approx(2735, rel=0.1)
    times = workloads.poisson(rng, 5.0, 1000.0)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == sorted(times)


def test_bursts_keep_their_load_and_differ_as_much_as_they_should() -> None:
    times = workloads.gamma(random.Random(1), 5.0, 10_000.0, 4.0)
    intervals = [later - sooner for sooner, later in pairwise([0.0, *times])]
    assert len(times) == 50_000
    assert times[-1] == pytest.approx(10_000.0)
    assert statistics.pstdev(intervals) / statistics.mean(intervals) == pytest.approx(4.0, rel=0.1)


def test_most_on_time_is_the_largest_set_that_can_be_served() -> None:
    rng = random.Random(7)
    given_up = 0
    for _ in range(100):
        jobs = sorted((Job(rng.uniform(0, 6), rng.randint(1, 30), 1, slo=Slo(ttft=2.0)) for _ in range(8)), key=_at)
        best = max(len(some) for size in range(9) for some in combinations(jobs, size) if _all_in_time(some))
        assert most_on_time(jobs, _tenths) == best
        given_up += best < len(jobs)
    assert given_up > 50, "hardly anything had to be given up"


def _at(job: Job) -> float:
    return job.at


def _tenths(job: Job) -> float:
    return 0.1 * job.num_prompt


def _all_in_time(jobs: Sequence[Job]) -> bool:
    now = 0.0
    for job in jobs:
        now = max(now, job.at) + _tenths(job)
        if now > job.at + 2.0:
            return False
    return True


@pytest.mark.parametrize(("caches", "found"), [(True, [0, 96, 0, 0]), (False, [0, 0, 0, 0])])
def test_a_family_shares_the_beginning_of_its_prompts(caches: bool, found: list[int]) -> None:
    family = [Job(float(i), 120, 5, family=7, num_shared=100) for i in range(2)]
    other = Job(2.0, 120, 5, family=8, num_shared=100)
    alone = Job(3.0, 120, 5)
    records = simulate([*family, other, alone], EngineSetup(Policy, Limits(4, 256), caches=caches)).records
    assert [record.output.cached_tokens for record in records if record.output] == found


def test_a_request_whose_objective_is_infeasible_is_rejected_as_the_server_would() -> None:
    # Its prompt alone takes 0.4 s beside what runs. Without SLO admission it would be queued and then shed.
    jobs = [Job(0.0, 4000, 5, slo=Slo(ttft=30.0)) for _ in range(10)] + [Job(1.0, 2000, 5, slo=Slo(ttft=0.25))]
    run_ = simulate(jobs, EngineSetup(SloAware, Limits(4, 512)))
    late = run_.records[-1]
    assert (late.finish, late.num_tokens, late.output) == ("rejected", 0, None)
    assert late.end == late.taken, "it is rejected at once"
    assert not late.is_met
    assert all(record.is_answered for record in run_.records[:-1])


def test_what_is_predicted_counts_from_when_the_engine_took_it() -> None:
    jobs = [Job(0.0, 2000, 5), Job(0.001, 100, 5)]
    late = simulate(jobs, EngineSetup(Policy, Limits(4, 4096), predicts=True)).records[1]
    assert late.predicted is not None
    assert late.taken - late.job.at == pytest.approx(late.ttft - late.predicted, rel=0.05)
    assert late.taken - late.job.at > late.predicted, "it waited out a long step"


def test_itls_are_counted_one_by_one() -> None:
    # Twenty rows whose prompts come one by one: nearly every step has another set of rows.
    jobs = [Job(0.05 * i, 50, 20 + 2 * i, max_tokens=100) for i in range(20)]
    run_ = simulate(jobs, EngineSetup(Policy, Limits(20, 128), num_blocks=24))
    assert run_.preemptions, "a stall must be among the ITLs"
    assert run_.itls.total() == sum(job.num_output - 1 for job in jobs)
    largest = max(record.max_itl for record in run_.records)
    assert run_.itl(1.0 - 1e-9) == pytest.approx(largest, abs=1e-4)


def test_the_largest_itl_of_a_request_alone_is_the_longest_step() -> None:
    run_ = simulate([Job(0.0, 10, 50)], EngineSetup(Policy, Limits(1, 128)))
    assert run_.records[0].max_itl == pytest.approx(max(step.seconds for step in run_.steps if not step.is_mixed))


def test_a_fixed_prediction_is_asked_for_each_job() -> None:
    jobs = [Job(float(i), 100, 5) for i in range(5)]
    records = simulate(jobs, EngineSetup(Policy, Limits(4, 128), predicts=True)).records
    for record in records:
        assert record.predicted == pytest.approx(record.ttft, rel=0.05)


@pytest.mark.parametrize("policy", ["sjf", "slo", "lanes"])
def test_memory_stays_full_while_it_is_measured(policy: str) -> None:
    load = FullLoad(policy, 16, 50, seed=0)
    load.warm_up()
    for _ in range(40):
        before = load.scheduler.num_running
        load.disturb()
        load.top_up()
        load.step()
        assert 0 < load.scheduler.num_running == before < load.scheduler.state.limits.rows
        assert load.scheduler.num_waiting == 50


def test_prompts_with_a_common_prefix_find_it_in_the_cache() -> None:
    load = CommonLoad("fcfs", 16, 50, seed=0)
    load.warm_up()
    assert {req.num_cached for req in load.scheduler.state.rows.running()} == {COMMON}
    assert load.scheduler.num_waiting == 50
    for _ in range(40):
        load.top_up()
        load.disturb()
        load.step()
    assert load.scheduler.num_waiting + load.scheduler.num_running > 50


def test_the_scheduler_bench_knows_lanes() -> None:
    assert isinstance(build("lanes"), Shared)
    assert measure("lanes", 64, 100, steps=10).us_per_step > 0
