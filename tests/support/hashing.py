"""A test executor whose KV cells hash the whole prefix, and the one-at-a-time oracle it must agree with.

Each cell is a hash of every cell before it, read through the row's table, and of its own token. A wrong table, a
lost copy, a block handed out twice or published too early changes every later token, so it cannot hide.
Plans are checked before they run: no row may write a block that another row reads or writes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.values.params import SamplingParams
from headway.values.plan import BlockRef, Join, Samples, StepPlan, StepResult, Tier

VOCAB = 50


def _next_cell(cells: list[int], token: int) -> int:
    return hash((hash(tuple(cells)), token))


def _draw(cells: list[int], seed: int) -> int:
    return hash((hash(tuple(cells)), seed, 7)) % VOCAB


def kv_of(tokens: list[int]) -> list[int]:
    """The KV of these tokens."""
    cells: list[int] = []
    for token in tokens:
        cells.append(_next_cell(cells, token))
    return cells


def oracle(prompt: list[int], params: SamplingParams, seed: int, stop_ids: frozenset[int]) -> list[int]:
    """The answer this request gets when it runs alone and nothing is paged, shared or preempted."""
    cells = kv_of(prompt)
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        token = _draw(cells, seed)
        answer.append(token)
        if token in stop_ids:
            break
        cells.append(_next_cell(cells, token))
    return answer


@dataclass
class Slot:
    join: Join
    tokens: list[int]
    table: list[int]
    length: int


@dataclass
class HashExecutor:
    """Runs plans in order, and refuses any plan that could race with itself.

    A device runs a plan at some time between submit and collect. Both extremes are here: `is_late` runs it at collect,
    so that whatever an external writer does in between happens before it.
    """

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    fail: dict[int, int] = field(default_factory=dict)  # request id -> output count at which its row fails
    computed_tokens: int = 0
    num_copies: int = 0
    is_late: bool = False

    def __post_init__(self) -> None:
        self.cells = {
            (tier, block): [0] * self.block_size
            for tier, count in ((Tier.DEVICE, self.num_blocks), (Tier.HOST, self.host_blocks))
            for block in range(count)
        }
        self.slots: dict[int, Slot] = {}
        self.plans: deque[StepPlan] = deque()  # submitted and not run
        self.results: deque[StepResult] = deque()
        self.last_id = -1

    def submit(self, plan: StepPlan) -> None:
        assert plan.id == self.last_id + 1
        assert plan.steps == 1
        self.last_id = plan.id
        self.plans.append(plan)
        if not self.is_late:
            self._run_next()

    def _run_next(self) -> None:
        plan = self.plans.popleft()
        for row in plan.leaves:
            del self.slots[row]
        for src, dst in plan.copies:
            self.cells[dst] = list(self.cells[src])
        written = {dst for _, dst in plan.copies}
        for block in plan.released:  # as a store that checks reads does
            if BlockRef(Tier.DEVICE, block) not in written:
                self.cells[Tier.DEVICE, block] = [-1] * self.block_size
        for join in plan.joins:
            assert join.row not in self.slots, "a row was joined twice"
            self.slots[join.row] = Slot(join, list(join.tokens), list(join.table), join.start)
        for grow in plan.grows:
            table = self.slots[grow.row].table
            table[grow.index : grow.index + len(grow.blocks)] = grow.blocks
        self._check_hazards(plan)
        self.computed_tokens += len(plan.decode) + sum(chunk.count for chunk in plan.chunks)
        self.num_copies += len(plan.copies)
        self.results.append(self._run(plan))

    def collect(self) -> StepResult:
        if self.is_late:
            self._run_next()
        return self.results.popleft()

    def _check_hazards(self, plan: StepPlan) -> None:
        spans = [(row, self.slots[row].length, self.slots[row].length + 1) for row in plan.decode]
        spans += [(c.row, c.start, c.start + c.count) for c in plan.chunks if c.count]  # a fork reads nothing
        assert len({row for row, _, _ in spans}) == len(spans), "a row is in a plan twice"
        writer: dict[int, int] = {}
        for row, start, end in spans:
            # Behind that lie blocks of draft tokens that were rejected: given back, and not read.
            table = self.slots[row].table[: -(-end // self.block_size)]
            assert len(set(table)) == len(table), "a block is in a table twice"
            assert end <= len(table) * self.block_size, "the table does not cover the tokens"
            for index in range(start // self.block_size, -(-end // self.block_size)):
                assert table[index] not in writer, "two rows write one block"
                writer[table[index]] = row
        for row, _, end in spans:
            for block in self.slots[row].table[: -(-end // self.block_size)]:
                assert writer.get(block, row) == row, "a row reads a block that another row writes"

    def _run(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        counts: dict[int, int] = {}
        stopped: list[int] = []
        failed: dict[int, str] = {}
        heads: dict[int, list[int]] = {}
        for row in plan.decode:
            self._advance(row, self.slots[row].length, 1)
        for chunk in plan.chunks:
            self._advance(chunk.row, chunk.start, chunk.count - len(chunk.drafts))
            source = chunk.row if chunk.source < 0 else chunk.source
            heads[chunk.row] = self._read(self.slots[source], self.slots[source].length)
        for row in plan.decode:
            self._sample(row, self._read(self.slots[row], self.slots[row].length), (), tokens, stopped, failed)
        for chunk in plan.chunks:
            if chunk.samples is not Samples.NONE:
                count = self._sample(chunk.row, heads[chunk.row], chunk.drafts, tokens, stopped, failed)
                if count != 1:
                    counts[chunk.row] = count
        return StepResult(plan.id, tokens, counts, stopped, failed)

    def write(self, table: list[int], tokens: list[int], start: int) -> None:
        """What an external writer does: the KV of these tokens from `start` on, whatever plans are in flight."""
        for position, value in enumerate(kv_of(tokens)[start:], start):
            self.cells[(Tier.DEVICE, table[position // self.block_size])][position % self.block_size] = value

    def read(self, table: list[int], upto: int) -> list[int]:
        """What an external reader sees."""
        size = self.block_size
        return [self.cells[(Tier.DEVICE, table[i // size])][i % size] for i in range(upto)]

    def block_layout(self) -> str:
        return f"hash[{self.block_size}]"

    def block_bytes(self) -> int:
        return 8 * self.block_size

    def read_block(self, block: int, into: memoryview) -> None:
        into[:] = array("q", self.cells[Tier.DEVICE, block]).tobytes()

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        self.cells[Tier.DEVICE, block] = list(array("q", bytes(data)))

    def _read(self, slot: Slot, upto: int) -> list[int]:
        return self.read(slot.table, upto)

    def _advance(self, row: int, start: int, count: int) -> None:
        slot = self.slots[row]
        assert slot.length == start, "a chunk does not start where its row ends"
        for position in range(start, start + count):
            self._write(slot, position, _next_cell(self._read(slot, position), slot.tokens[position]))
        slot.length = start + count

    def _write(self, slot: Slot, position: int, value: int) -> None:
        block = slot.table[position // self.block_size]
        self.cells[(Tier.DEVICE, block)][position % self.block_size] = value

    def _sample(self, row, cells, drafts, tokens, stopped, failed) -> int:
        slot = self.slots[row]
        num_output = len(slot.tokens) - slot.join.num_prompt
        if self.fail.get(slot.join.id) == num_output:
            failed[row] = "told to fail"
            tokens.append(0)
            slot.tokens.append(0)  # plans in flight go on with it
            return 1
        new = [_draw(cells, slot.join.seed)]
        for guess in drafts:
            if new[-1] != guess or new[-1] in slot.join.stop_ids:
                break
            value = _next_cell(cells, guess)
            cells = [*cells, value]
            self._write(slot, slot.length, value)
            slot.length += 1
            new.append(_draw(cells, slot.join.seed))
        slot.tokens += new
        tokens += new
        if new[-1] in slot.join.stop_ids:
            stopped.append(row)
        return len(new)
