"""Loading, held, leases, feedback, ragged results, failed rows: with the null executor and with the hashing one."""

import gc
import itertools
import math
from dataclasses import replace

import pytest

from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Account, Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity, Late
from headway.engine.null import NullExecutor
from headway.errors import RequestError
from headway.values.events import Finished, Preempted
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob
from headway.values.states import Finish, State
from headway.values.work import Work
from rig import EventLog, Rig


class Null:
    """The scheduler over the null executor, at a depth."""

    def __init__(self, depth: int = 1, num_blocks: int = 16, policy: Policy | None = None, gate=None, **null) -> None:
        self.log = EventLog()
        self.scheduler = Scheduler(
            KVLedger(num_blocks, 4), Limits(4, 16), policy or Policy(), sink=self.log, gate=gate
        )  # fmt: skip
        self.executor = NullExecutor(Capacity(num_blocks, 4, 4), **null)
        self.depth, self.now, self.pending, self.finished, self.counts = depth, 0.0, [], [], {}

    def step(self):
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        self.finished += self.scheduler.take_finished()
        if plan is not None:
            self.executor.submit(plan)
            self.pending.append(plan)
        if self.pending and (plan is None or len(self.pending) >= self.depth):
            told = self.scheduler.commit(self.pending.pop(0), self.executor.collect())
            self.finished += told.finished
            for id in told.ids:
                self.counts[id] = self.counts.get(id, 0) + 1
        return plan

    def run(self, most: int = 60) -> None:
        for _ in range(most):
            self.step()

    def drain(self, most: int = 60) -> None:
        """Step as an engine does: only while the scheduler says that there is work."""
        while self.scheduler.has_work or self.pending:
            self.step()
            most -= 1
            assert most > 0, "no end in sight"


def _request(id: int, prompt: int = 4, max_tokens: int = 3, **fields) -> Request:
    return Request(id, list(range(prompt)), SamplingParams(max_tokens=max_tokens), arrival=id, **fields)


DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@DEPTHS
def test_plain_requests_end_by_length(depth: int) -> None:
    null = Null(depth)
    for id in range(6):
        null.scheduler.add(_request(id))
    null.run()
    assert {req.id: req.finish for req in null.finished} == dict.fromkeys(range(6), Finish.LENGTH)
    assert null.counts == dict.fromkeys(range(6), 3)
    assert not null.scheduler.has_work


@DEPTHS
def test_a_stop_token_ends_a_request_and_nothing_after_it_counts(depth: int) -> None:
    null = Null(depth, stops={0: 2})
    null.scheduler.add(_request(0, max_tokens=9))
    null.scheduler.add(_request(1, max_tokens=9))
    null.run()
    assert {req.id: req.finish for req in null.finished} == {0: Finish.STOP, 1: Finish.LENGTH}
    assert null.counts == {0: 2, 1: 9}


@DEPTHS
def test_a_stop_on_the_last_token_is_a_stop(depth: int) -> None:
    null = Null(depth, stops={0: 3})
    null.scheduler.add(_request(0))
    null.run()
    assert null.finished[0].finish is Finish.STOP
    assert null.counts == {0: 3}


@DEPTHS
def test_a_failed_row_hurts_only_itself(depth: int) -> None:
    null = Null(depth, fails={1: 2})
    for id in range(3):
        null.scheduler.add(_request(id))
    null.run()
    assert {req.id: req.finish for req in null.finished} == {0: Finish.LENGTH, 1: Finish.ERROR, 2: Finish.LENGTH}
    assert next(req for req in null.finished if req.id == 1).error == "told to fail"
    assert null.counts == {0: 3, 1: 1, 2: 3}


@DEPTHS
def test_a_row_that_fails_in_its_prompt_publishes_nothing(depth: int) -> None:
    null = Null(depth, fails={0: 1})
    null.scheduler.add(_request(0, prompt=8, keys=[b"a", b"b"], chain=b"c"))
    null.run()
    assert null.finished[0].finish is Finish.ERROR
    assert null.scheduler.state.ledger.num_idle == 0


@DEPTHS
def test_drafts_make_ragged_results(depth: int) -> None:
    null = Null(depth, accepts=2)
    req = _request(0, max_tokens=8, needs_feedback=True)
    null.scheduler.add(req)
    null.scheduler.add(_request(1, max_tokens=8))
    null.step()
    while not req.num_output:
        null.step()
    req.draft = (1, 1, 1)
    plan = null.step()
    assert [chunk.count for chunk in plan.chunks] == [4]
    null.run()
    assert null.counts == {0: 8, 1: 8}
    assert {req.finish for req in null.finished} == {Finish.LENGTH}


@DEPTHS
def test_drafts_beyond_the_length_limit_are_not_planned(depth: int) -> None:
    null = Null(depth, accepts=9)
    req = _request(0, max_tokens=3, needs_feedback=True)
    null.scheduler.add(req)
    while not req.num_output:
        null.step()
    req.draft = (1,) * 9
    null.run()
    assert null.counts == {0: 3}


@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_that_needs_feedback_is_not_planned_while_its_result_is_uncollected(depth: int) -> None:
    null = Null(depth)
    null.scheduler.add(_request(0, max_tokens=5, needs_feedback=True))
    null.scheduler.add(_request(1, max_tokens=20))
    plans = [null.step() for _ in range(8)]
    num_scheduled = [any(chunk.row == 0 for chunk in plan.chunks) for plan in plans]
    assert not any(a and b for a, b in itertools.pairwise(num_scheduled))
    assert sum(num_scheduled) >= 2


@DEPTHS
def test_a_held_request_keeps_its_blocks_until_its_lease_ends(depth: int) -> None:
    null = Null(depth)
    req = _request(0, lease_s=5.0)
    null.scheduler.add(req)
    while req.state is not State.HELD:
        null.step()
    assert [r.id for r in null.finished] == [0]
    assert req.table
    assert req.num_computed == 6
    assert null.scheduler.abort(99) is None
    assert null.scheduler.next_expiry == null.scheduler.state.now + 5.0
    null.step()
    assert req.state is State.HELD
    null.drain()
    assert req.state is State.DONE
    assert null.scheduler.state.ledger.pool.available == 16
    assert null.scheduler.next_expiry == math.inf
    assert len(null.finished) == 1


def test_a_held_request_is_released_by_its_peer_or_by_abort() -> None:
    for end in ("release", "abort"):
        null = Null()
        req = _request(0, lease_s=500.0)
        null.scheduler.add(req)
        null.run(5)
        assert getattr(null.scheduler, end)(0) is None
        assert req.state is State.DONE
        assert null.scheduler.state.ledger.pool.available == 16
        null.scheduler.release(0)  # twice does no harm


def test_a_loading_request_waits_outside_until_its_kv_is_there() -> None:
    rig = Rig(num_blocks=16, block_size=4, rows=2, tokens=16)
    donor = rig.add(list(range(8)), 1)
    rig.drain()
    assert donor.finish is Finish.LENGTH
    req = rig.add(list(range(8)), 3, state=State.LOADING)
    rig.step()
    assert req.state is State.LOADING
    cells = rig.executor.cells
    for i in range(2):  # the peer writes the KV of the prompt into its blocks
        source = rig.ledger.index.find_chain(req.keys)[i]
        cells[(0, req.table[i])] = list(cells[(0, source)])
    rig.scheduler.loaded(req.id, 8)
    rig.scheduler.loaded(req.id, 8)  # a repeated message changes nothing
    rig.drain()
    rig.verify()
    assert req.num_cached == 7


def test_kv_from_elsewhere_never_lands_in_blocks_that_a_plan_in_flight_still_writes() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=2, tokens=16, depth=2, is_late=True, caching=False)
    gone = rig.add(list(range(8)), 4)
    rig.step()  # in flight: it will write four of the six blocks
    rig.abort(gone.id)
    loading = rig.add(list(range(20, 26)), 3, state=State.LOADING)
    assert loading.state is State.WAITING, "two blocks are settled, and it needs three"
    small = rig.add(list(range(30, 34)), 3, state=State.LOADING)
    assert small.state is State.LOADING
    rig.load(small.id, 4)
    rig.drain()
    rig.verify()
    later = rig.add(list(range(20, 26)), 3, state=State.LOADING)
    assert later.state is State.LOADING
    rig.load(later.id, 6)
    rig.drain()
    rig.verify()


def test_kv_from_elsewhere_never_lands_in_blocks_that_a_queued_copy_still_reads() -> None:
    rig = Rig(num_blocks=4, block_size=2, rows=2, tokens=16, host_blocks=4, is_late=True)
    swapped = rig.add(list(range(6)), 3)
    rig.step()
    preempt(rig.scheduler.state, swapped)  # its blocks are free, and the copy of them is not planned yet
    assert swapped.host_table
    loading = rig.add(list(range(20, 26)), 2, state=State.LOADING)
    if loading.state is State.LOADING:
        rig.load(loading.id, 6)
    rig.drain()
    rig.verify()


def test_a_running_request_alone_takes_back_what_was_loaded_for_a_waiting_one() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=1, tokens=16, depth=2)
    runs = rig.add([1, 2, 3, 4], 7)  # five blocks in the end
    rig.step()
    waits = rig.add([5, 6, 7], 2, state=State.LOADING)  # two blocks
    rig.load(waits.id, 3)
    rig.drain(most=40)
    rig.verify()
    assert (runs.num_preempted, waits.finish) == (0, Finish.LENGTH)


def test_a_load_that_fails_or_never_comes_is_computed_here() -> None:
    for fails in (True, False):
        rig = Rig()
        req = rig.add(list(range(8)), 3, state=State.LOADING)
        if fails:
            rig.scheduler.loaded(req.id, 0)
        rig.drain()
        rig.verify()
        assert len(rig.streams[req.id]) == 3


def test_computed_tokens_of_a_waiting_request_are_its_own_whatever_the_last_row_holds() -> None:
    null = Null()
    for id in range(4):
        null.scheduler.add(_request(id, prompt=3, max_tokens=9))
    null.step()
    null.step()
    waiting = _request(4, prompt=8, state=State.LOADING)
    null.scheduler.add(waiting)
    null.scheduler.loaded(4, 3)
    assert [null.scheduler.state.rows.num_computed(req) for req in null.scheduler.state.rows.running()] == [4] * 4
    assert (waiting.row, null.scheduler.state.rows.num_computed(waiting)) == (-1, 3)


def test_the_lease_of_a_loading_request_begins_when_it_comes_however_long_the_engine_was_idle() -> None:
    null = Null()
    req = _request(1000, prompt=8, state=State.LOADING)
    null.scheduler.add(req, lease_s=5.0)
    assert null.scheduler.next_expiry == 1005.0
    null.scheduler.schedule(1004.0)
    assert req.state is State.LOADING


def test_a_loading_request_without_room_is_computed_here() -> None:
    rig = Rig(num_blocks=3, block_size=4, rows=2, tokens=8)
    rig.add(list(range(9)), 2)
    rig.step()
    req = rig.add(list(range(20, 26)), 2, state=State.LOADING)
    assert req.state is State.WAITING
    rig.drain()
    rig.verify()


def test_a_loading_request_can_be_aborted() -> None:
    rig = Rig()
    req = rig.add(list(range(8)), 3, state=State.LOADING)
    rig.abort(req.id)
    assert rig.outcomes == {req.id: Finish.ABORT}
    assert rig.ledger.pool.available == 16


def test_loaded_blocks_are_given_up_when_they_block_the_head() -> None:
    null = Null(num_blocks=4)
    null.scheduler.add(_request(0, prompt=10, max_tokens=1))
    loading = _request(1, prompt=8, max_tokens=1, state=State.LOADING)
    null.scheduler.add(loading)
    null.scheduler.loaded(1, 8)
    null.run()
    assert [req.id for req in null.finished] == [0, 1]


def test_while_a_lease_holds_the_pool_the_head_waits_and_is_not_failed() -> None:
    null = Null(num_blocks=4)
    null.scheduler.add(_request(0, prompt=10, max_tokens=1, lease_s=10.0))
    null.scheduler.add(_request(1, prompt=10, max_tokens=1))
    null.run(8)
    assert [req.id for req in null.finished] == [0]
    null.run(8)
    assert [(req.id, req.finish) for req in null.finished] == [(0, Finish.LENGTH), (1, Finish.LENGTH)]


def test_a_head_that_cannot_run_is_failed_instead_of_blocking_for_ever() -> None:
    null = Null(num_blocks=4)
    null.scheduler.state.ledger.pool.take(3)  # blocks that are never given back
    null.scheduler.add(_request(0, prompt=10, max_tokens=1))
    null.scheduler.add(_request(1, prompt=3, max_tokens=1))
    null.run(5)
    assert [(req.id, req.finish) for req in null.finished] == [(0, Finish.ERROR), (1, Finish.LENGTH)]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    null = Null(num_blocks=4)
    with pytest.raises(RequestError, match="16 tokens of the KV cache") as caught:
        null.scheduler.add(_request(0, prompt=10, max_tokens=8))
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    null.scheduler.add(_request(0, prompt=10, max_tokens=7))


def test_a_gate_decides_when_requests_are_admitted() -> None:
    class Pairs:  # static batches of two
        is_barrier = False

        def num_slots(self, now: float, num_running: int, num_waiting: int, oldest: float) -> int:
            return 0 if num_running else 2

    null = Null(gate=Pairs())
    for id in range(3):
        null.scheduler.add(_request(id, max_tokens=id + 1))
    boarded = [{join.id for join in plan.joins} for plan in (null.step() for _ in range(6)) if plan]
    assert boarded == [{0, 1}, set(), {2}, set(), set()]
    closed = Null(gate=type("Closed", (), {"is_barrier": False, "num_slots": lambda *_: 0})())
    closed.scheduler.add(_request(0))
    assert closed.step() is None
    assert closed.scheduler.has_work


def test_an_infeasible_request_is_refused_before_it_costs_anything() -> None:
    class Strict(Policy):
        def is_infeasible(self, req: Request, now: float) -> bool:
            return req.id == 0

    null = Null(policy=Strict())
    null.scheduler.add(_request(0))
    null.scheduler.add(_request(1))
    null.run()
    assert {req.id: req.finish for req in null.finished} == {0: Finish.SHED, 1: Finish.LENGTH}
    assert 0 not in null.counts


class Patient(Policy):
    """A request that has not started after a thousand seconds is shed."""

    def latest_start(self, req: Request) -> float:
        return req.arrival + 1000.0


def test_requests_that_have_ended_are_forgotten_however_far_their_latest_start() -> None:
    null = Null(policy=Patient())
    before = _num_requests()
    for id in range(0, 600, 3):
        for more in range(3):
            null.scheduler.add(_request(id + more, parent=id if more == 1 else None))  # runs, forks, is aborted
        null.scheduler.abort(id + 2)
        null.drain()
        null.finished.clear()
    null.log.events.clear()
    assert _num_requests() - before < 200, "of six hundred"


def _num_requests() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


def test_a_request_is_shed_at_its_latest_start_unless_it_has_run() -> None:
    null = Null(policy=Patient())
    ran = _request(0, prompt=10, max_tokens=40)
    null.scheduler.add(ran)
    null.step()
    preempt(null.scheduler.state, ran)
    null.scheduler.state.gate = type("Shut", (), {"is_barrier": False, "num_slots": lambda *_: 0})()
    null.scheduler.add(_request(1))
    null.scheduler.add(_request(2, parent=1))
    null.now = 1000.0
    null.step()
    assert [(req.id, req.finish) for req in null.finished] == []
    null.step()
    null.step()
    assert {req.id: req.finish for req in null.finished} == {1: Finish.SHED, 2: Finish.SHED}
    assert ran.state is State.WAITING


@DEPTHS
def test_a_policy_gets_the_service_of_each_tenant(depth: int) -> None:
    class Meter(Policy):
        def __init__(self) -> None:
            self.given: dict[str, list[int]] = {}
            self.ended: list[int] = []

        def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
            total = self.given.setdefault(account.tenant, [0, 0])
            total[0] += num_in
            total[1] += num_out

        def on_finish(self, req: Request) -> None:
            self.ended.append(req.id)

    meter = Meter()
    null = Null(depth, policy=meter)
    null.scheduler.add(_request(0, prompt=5, max_tokens=4, tenant="a"))
    null.scheduler.add(_request(1, prompt=7, max_tokens=2, tenant="b"))
    null.run()
    assert meter.given == {"a": [5, 4], "b": [7, 2]}
    assert sorted(meter.ended) == [0, 1]


def test_a_pacer_bounds_what_a_step_carries() -> None:
    class Slow:
        def tokens(self, work: Work, start: int, itl_target: float) -> int:
            return 3

        def has_slot(self, work: Work) -> bool:
            return True

    scheduler = Scheduler(KVLedger(8, 4), Limits(2, 16), Policy(), pacer=Slow())
    scheduler.add(_request(0, prompt=8))
    assert scheduler.schedule(0.0).work.tokens == 3


def test_surprises_in_a_void_row_reach_no_request() -> None:
    null = Null(depth=2, fails={0: 2}, stops={1: 2})
    for id in range(2):
        null.scheduler.add(_request(id, max_tokens=9))
    null.step()
    null.step()  # the second tokens are in flight now
    for id in range(2):
        assert null.scheduler.abort(id).finish is Finish.ABORT
    null.run()
    assert null.finished == []


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_find_their_request_and_skip_the_gone(depth: int) -> None:
    null = Null(depth)
    for id in range(2):
        null.scheduler.add(_request(id, max_tokens=9))
    plan = null.scheduler.schedule(0.0)
    null.executor.submit(plan)
    result = replace(null.executor.collect(), logprobs={0: [TokenLogprob(-0.5)], 1: [TokenLogprob(-0.25)]})
    null.scheduler.abort(1)
    told = null.scheduler.commit(plan, result)
    assert told.logprobs == {0: [TokenLogprob(-0.5)]}


def test_the_null_executor_takes_nothing_late() -> None:
    null = Null()
    null.executor.supply(0, Late())
    with pytest.raises(ValueError, match="nothing late"):
        null.executor.supply(0, Late(masks=((0, b"\x00"),)))
    null.executor.close()
    assert null.executor.capacity().num_blocks == 16


def test_events_record_the_life_of_a_request() -> None:
    null = Null()
    null.scheduler.add(_request(0, max_tokens=8))
    null.step()
    null.step()
    preempt(null.scheduler.state, null.scheduler.state.rows.running()[0])
    null.run()
    assert [event.num_lost for event in null.log.of(Preempted)] == [5]
    assert [(event.reason, event.num_output) for event in null.log.of(Finished)] == [("length", 8)]


def test_kv_from_elsewhere_never_lands_in_a_block_that_a_plan_in_flight_says_is_released() -> None:
    rig = Rig(num_blocks=4, block_size=4, rows=2, tokens=16, depth=3)
    gone = rig.add([1] * 12, 1)
    rig.step()
    rig.add([2] * 3, 8)
    rig.abort(gone.id)
    rig.step()
    assert set(rig.plans[-1].released) >= {0, 1, 2}
    rig.collect()  # the first plan alone
    late = rig.add([3] * 8, 2, state=State.LOADING)
    assert not set(late.table) & set(rig.plans[-1].released)
