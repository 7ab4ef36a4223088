"""An executor that does everything but the maths: for the scheduler's benchmark, the simulator and tests.

Every sampled token is the same. Failures, stops and accepted drafts can be arranged per request, so that the
engine's reactions are seen without a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from headway.engine.executor import Capacity, Late
from headway.values.plan import Samples, StepPlan, StepResult

_BLOCK_BYTES = 32


class NullExecutor:
    """Keeps no KV; knows only which request is in which row and how many tokens it has.

    Blocks written from outside are kept, so that they can be read again; others read as zeros.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        token: int = 1,
        stops: Mapping[int, int] | None = None,
        fails: Mapping[int, int] | None = None,
        accepts: int = 0,
    ) -> None:
        self._capacity = capacity
        self._token = token
        self._stops = dict(stops or {})  # request id -> its how-many-eth token is a stop token
        self._fails = dict(fails or {})  # request id -> likewise, its row fails
        self._accepts = accepts  # how many drafts are right
        self._id_of: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._results: deque[StepResult] = deque()
        self._written: dict[int, bytes] = {}  # blocks from outside

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._id_of[join.row] = join.id
            self._given[join.id] = len(join.tokens) - join.num_prompt
        counts = {
            chunk.row: 1 + min(len(chunk.drafts) + chunk.num_drafts, self._accepts)
            for chunk in plan.chunks
            if chunk.samples is Samples.VERIFY
        }
        rows = plan.sampling_rows()
        total = len(rows) + sum(counts.values()) - len(counts)
        stopped, failed = self._surprises(rows) if self._stops or self._fails else ([], {})
        self._results.append(StepResult(plan.id, [self._token] * total, counts, stopped, failed))

    def _surprises(self, rows: list[int]) -> tuple[list[int], dict[int, str]]:
        stopped, failed = [], {}
        for row in rows:
            id = self._id_of[row]
            self._given[id] += 1
            if self._stops.get(id) == self._given[id]:
                stopped.append(row)
            if self._fails.get(id) == self._given[id]:
                failed[row] = "told to fail"
        return stopped, failed

    def supply(self, plan_id: int, late: Late) -> None:
        if late:
            raise ValueError("this executor takes nothing late")

    def collect(self) -> StepResult:
        return self._results.popleft()

    def block_layout(self) -> str:
        return f"null[{_BLOCK_BYTES}]"

    def block_bytes(self) -> int:
        return _BLOCK_BYTES

    def read_block(self, block: int, into: memoryview) -> None:
        into[:] = self._written.get(block, bytes(_BLOCK_BYTES))

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        self._written[block] = bytes(data)

    def close(self) -> None:
        self._results.clear()
