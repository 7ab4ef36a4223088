"""A model-based test of scheduler, ledger and pool: any order of calls keeps the invariants and drains."""

from __future__ import annotations

from core.test_pausing import RandomPauses
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.core.preemption import preempt
from headway.errors import RequestError
from headway.values.limits import Admission
from headway.values.states import Finish, State
from rig import Rig

STEMS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 9, 9, 9, 9], [7] * 13]


class Machine(RuleBasedStateMachine):
    """Rules are what the outside may do; after each one the rig checks every invariant."""

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.integers(1, 4),
        rows=st.integers(1, 4),
        tokens=st.integers(1, 12),
        chunk=st.sampled_from([None, 1, 4]),
        depth=st.integers(1, 3),
        host_blocks=st.sampled_from([0, 6]),
        caching=st.booleans(),
        pause_seed=st.sampled_from([None, None, 1]),
        is_late=st.booleans(),
        preemptions=st.sampled_from([0, 1, 3]),
        admission=st.sampled_from(list(Admission)),
    )
    def build(self, pause_seed, **shape) -> None:
        self.rig = Rig(**shape, policy=None if pause_seed is None else RandomPauses(pause_seed))

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 13),
        tail=st.lists(st.integers(0, 49), max_size=3),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(["", "a"]),
        stop=st.sampled_from([(), tuple(range(10))]),
        feedback=st.booleans(),
        answers=st.sampled_from([1, 1, 1, 3]),
        lease=st.sampled_from([None, None, 2.0]),
        state=st.sampled_from([State.WAITING, State.WAITING, State.LOADING]),
    )
    def add(self, stem, cut, tail, max_tokens, salt, stop, feedback, answers, lease, state) -> None:
        prompt, parent = stem[:cut] + tail, None
        for seed in range(answers):
            try:
                req = self.rig.add(
                    prompt, max_tokens, seed=seed, stop=stop, tenant=salt, needs_feedback=feedback,
                    parent=parent, lease_s=lease, state=state,
                )  # fmt: skip
                state = State.WAITING
            except RequestError:
                num_tokens = self.rig.ledger.pool.num_blocks * self.rig.ledger.block_size
                assert len(prompt) + max_tokens - 1 > num_tokens - self.rig.ledger.block_size
                return
            parent = req.id if parent is None else parent

    @rule(num=st.integers(1, 6))
    def run_steps(self, num: int) -> None:
        for _ in range(num):
            self.rig.step()

    @precondition(lambda self: self.rig.accepted)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.accepted))))

    @precondition(lambda self: self.rig.scheduler.state.rows.running())
    @rule(data=st.data())
    def preempt(self, data) -> None:
        running = sorted(self.rig.scheduler.state.rows.running(), key=lambda req: req.id)
        preempt(self.rig.scheduler.state, data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.rig.scheduler.state.rows.running())
    @rule(data=st.data(), is_preempted=st.booleans())
    def replace_by_a_load(self, data, is_preempted: bool) -> None:
        """KV from elsewhere takes all free memory, some of it of a request that plans or queued copies still name."""
        rig = self.rig
        gone = data.draw(st.sampled_from(sorted(rig.scheduler.state.rows.running(), key=lambda req: req.id)))
        if is_preempted:
            preempt(rig.scheduler.state, gone)
        else:
            rig.abort(gone.id)
        if num_free := rig.ledger.num_free * rig.ledger.block_size:
            prompt = [(gone.id + i) % 50 for i in range(num_free)]
            req = rig.add(prompt, 1, state=State.LOADING)
            if req.state is State.LOADING:
                rig.load(req.id, num_free)

    @precondition(lambda self: self.rig.scheduler.state.rows.running())
    @rule(data=st.data(), wrong=st.booleans())
    def draft(self, data, wrong: bool) -> None:
        for req in self.rig.scheduler.state.rows.running():
            if req.needs_feedback and len(req.tokens) - req.num_scheduled == 1:
                guess = self.rig.expected(req.id)[req.num_output :][:3]
                req.draft = (*guess[:-1], 51) if wrong else tuple(guess)

    @precondition(lambda self: self.rig.scheduler.state.rows.running())
    @rule(data=st.data())
    def change_pace(self, data) -> None:
        """A row that decodes waits for its results from now on, one that waits decodes."""
        state = self.rig.scheduler.state
        for req in data.draw(st.lists(st.sampled_from(sorted(state.rows.running(), key=lambda req: req.id)))):
            if not req.needs_feedback:
                state.rows.await_results(req, state.step)
            elif self.rig.may_decode_ahead(req):
                req.draft = ()
                state.rows.decode_ahead(req, state.step)

    @rule()
    def reset_cache(self) -> None:
        self.rig.reset_cache()

    def leased(self, state: State) -> list[int]:
        return [id for id in sorted(self.rig.scheduler.state.leases) if self.rig.accepted[id].state is state]

    @precondition(lambda self: self.leased(State.HELD))
    @rule(data=st.data())
    def release(self, data) -> None:
        self.rig.release(data.draw(st.sampled_from(self.leased(State.HELD))))

    @precondition(lambda self: self.leased(State.LOADING))
    @rule(data=st.data(), is_reported=st.booleans())
    def arrive(self, data, is_reported: bool) -> None:
        """A peer writes some more of what a loading request waits for, whatever is in flight."""
        id = data.draw(st.sampled_from(self.leased(State.LOADING)))
        least = max(1, self.rig.arrived.get(id, 0))
        num_tokens = data.draw(st.integers(least, self.rig.accepted[id].num_prompt))
        (self.rig.load if is_reported else self.rig.arrive)(id, num_tokens)

    @precondition(lambda self: self.leased(State.LOADING))
    @rule(data=st.data())
    def fail_to_load(self, data) -> None:
        self.rig.scheduler.loaded(data.draw(st.sampled_from(self.leased(State.LOADING))), 0)

    @invariant()
    def metrics_are_kept(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.drain()
        rig.verify()
        assert not rig.scheduler.state.live
        assert rig.ledger.pool.available == rig.ledger.pool.num_blocks
        assert all(req.state is State.DONE for req in rig.accepted.values())
        assert Finish.ERROR not in rig.outcomes.values()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
