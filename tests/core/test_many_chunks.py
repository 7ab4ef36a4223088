"""Planning many chunks costs what the chunks are worth, not their square."""

from headway.core.policy import Policy
from headway.core.request import Request
from rig import Rig


class CountingRanks(Policy):
    num_ranks = 0

    def rank(self, req: Request) -> int:
        self.num_ranks += 1
        return 0


def test_rows_that_need_feedback_are_planned_in_linear_time() -> None:
    policy, count = CountingRanks(), 200
    rig = Rig(num_blocks=4 * count, block_size=16, rows=count, tokens=4 * count, policy=policy)
    for i in range(count):
        rig.add([i, i + 1], 8, needs_feedback=True)
    rig.step()
    before = policy.num_ranks
    plan = rig.step()
    assert plan is not None
    assert len(plan.chunks) == count
    assert policy.num_ranks - before <= 4 * count
    rig.drain()
    rig.verify()


def test_drafts_of_one_row_leave_a_token_for_each_of_the_others() -> None:
    rig = Rig(num_blocks=200, block_size=4, rows=2, tokens=6)
    requests = [rig.add([i], 40, needs_feedback=True) for i in (1, 2)]
    for step in range(6):
        for req in requests:
            req.draft = tuple(rig.expected(req.id)[req.num_output :][:8]) if req.row >= 0 else ()
        rig.step()
        assert min(req.num_output for req in requests) > step
    rig.drain()
    rig.verify()
