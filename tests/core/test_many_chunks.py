"""Planning many chunks costs what the chunks are worth, not their square."""

from collections.abc import Iterator

from headway.core.builder import PlanBuilder
from headway.core.policy import Policy
from headway.core.request import Request
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Samples
from headway.values.work import Work
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


class CountingChunks(list[tuple[Chunk, Request]]):
    num_visits = 0

    def __iter__(self) -> Iterator[tuple[Chunk, Request]]:
        self.num_visits += 1
        return super().__iter__()


def test_what_a_plan_carries_so_far_is_known_without_a_look_at_its_chunks() -> None:
    chunks, req = CountingChunks(), Request(0, [1] * 9, SamplingParams())
    plan = PlanBuilder(chunks=chunks)
    for start in (0, 4, 8):  # the pacer asks before each chunk
        plan.add_chunk(Chunk(0, start, 4, Samples.NONE), req)
        assert plan.work(2, 70).chunks == len(chunks)
    assert plan.work(2, 70) == Work(tokens=12, pairs=12 * 12, decode=2, context=70, chunks=3)
    assert chunks.num_visits == 0


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
