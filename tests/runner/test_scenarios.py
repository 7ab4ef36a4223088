"""Random lives of requests through the executor: whatever happens around a request, its tokens are the oracle's."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest

from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, BlockRef, Chunk, Grow, Join, Samples, StepPlan, Tier
from runner_kit import BLOCK, VOCAB, Desk, oracle

NUM_ROWS = 4


@dataclass(eq=False)
class Life:
    """A request as a scheduler would see it: `planned` tokens, tokens that came back, a row or none."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    output: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    row: int = -1
    epoch: int = 0
    planned: int = 0
    in_flight: int = 0

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def sampled(self) -> int:
        return len(self.output) + self.in_flight

    @property
    def is_ready(self) -> bool:
        """Only its newest token, sampled or on the way, is not computed."""
        return self.row >= 0 and self.planned == self.known + self.in_flight - 1

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.params.max_tokens


def _life(rng: Random) -> Life:
    params = SamplingParams(
        max_tokens=rng.randint(1, 9),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 10]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        frequency_penalty=rng.choice([0.0, 0.5]),
    )
    return Life(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))), params, rng.randrange(2**64))


class Scene:
    """A careless scheduler: it chunks, forks, preempts and reuses blocks at random, but keeps the plan's rules."""

    def __init__(self, rng: Random, depth: int) -> None:
        self.rng, self.depth = rng, depth
        self.desk = Desk(num_rows=NUM_ROWS, num_blocks=40, has_thread=depth > 1)
        self.lives = [_life(rng) for _ in range(7)]
        self.rows: list[Life | None] = [None] * NUM_ROWS
        self.flights: deque[tuple[StepPlan, dict[int, tuple[Life, int]]]] = deque()

    def run(self) -> None:
        for _ in range(600):
            if all(life.is_done for life in self.lives):
                break
            self.step()
            while len(self.flights) >= self.depth:
                self.collect()
        self.desk.executor.close()
        assert all(life.is_done for life in self.lives)

    def step(self) -> None:
        self.joins: list[Join] = []
        self.grows: list[Grow] = []
        self.copies: list[BlockCopy] = []
        self.leaves: list[int] = []
        self.chunks: list[Chunk] = []
        for life in self.lives:
            if life.row >= 0 and (life.sampled >= life.params.max_tokens or self.rng.random() < 0.06):
                self.vacate(life)
        decode = [life.row for life in self.lives if life.is_ready and self.reserve(life, 1)]
        for row in decode:
            self.sample(self.at(row), 1)
        for life in self.lives:
            if life.row >= 0 and life.planned < life.known and life.row not in decode and not life.in_flight:
                self.fill(life)
        for life in self.lives:
            if life.row < 0 and not life.is_done and not life.in_flight and None in self.rows:
                self.request(life)
        if not decode and not self.chunks:
            if self.flights:
                self.collect()
            return
        plan = self.desk.submit(decode, self.chunks, self.joins, self.leaves, self.grows, self.copies)
        owners = {row: (self.at(row), self.at(row).epoch) for row in plan.sampling_rows()}
        self.flights.append((plan, owners))

    def collect(self) -> None:
        plan, owners = self.flights.popleft()
        result = self.desk.executor.collect()
        assert not result.failed
        for row, token in zip(plan.sampling_rows(), result.tokens, strict=True):
            life, epoch = owners[row]
            if life.epoch == epoch:
                life.output.append(token)
                life.in_flight -= 1

    def at(self, row: int) -> Life:
        life = self.rows[row]
        assert life is not None
        return life

    def vacate(self, life: Life) -> None:
        if life.in_flight and life.sampled >= life.params.max_tokens:
            return  # its last token is on the way
        self.leaves.append(life.row)
        self.rows[life.row] = None
        self.desk.free += [block for block in life.table if not any(block in o.table for o in self.lives if o != life)]
        self.rng.shuffle(self.desk.free)
        life.table, life.row, life.planned, life.in_flight = [], -1, 0, 0
        life.epoch += 1

    def reserve(self, life: Life, count: int) -> bool:
        """Blocks for the next tokens; a shared block is copied before it is written."""
        if life.sampled >= life.params.max_tokens:
            return False
        at = life.planned // BLOCK
        if life.planned % BLOCK and any(life.table[at] in o.table for o in self.lives if o is not life):
            mine = self.desk.free.pop()
            device = Tier.DEVICE
            self.copies.append(BlockCopy(BlockRef(device, life.table[at]), BlockRef(device, mine)))
            self.grows.append(Grow(life.row, at, (mine,)))
            life.table[at] = mine
        missing = -(-(life.planned + count) // BLOCK) - len(life.table)
        if missing > 0:
            blocks = tuple(self.desk.free.pop() for _ in range(missing))
            self.grows.append(Grow(life.row, len(life.table), blocks))
            life.table += blocks
        return True

    def sample(self, life: Life, count: int) -> None:
        life.planned += count
        life.in_flight += 1

    def fill(self, life: Life) -> None:
        count = self.rng.randint(1, life.known - life.planned)
        self.reserve(life, count)
        is_last = life.planned + count == life.known
        samples = Samples.TOKEN if is_last else Samples.NONE
        self.chunks.append(Chunk(life.row, life.planned, count, samples))
        if not is_last:
            life.planned += count
            return
        self.sample(life, count)
        if not life.output:
            self.fork(life)

    def fork(self, leader: Life) -> None:
        twin = next((o for o in self.lives if o.row < 0 and not o.sampled and o is not leader), None)
        if twin is None or None not in self.rows or self.rng.random() < 0.3:
            return
        twin.prompt, twin.table = leader.prompt, list(leader.table)
        self.take_row(twin, start=len(twin.prompt))
        self.chunks.append(Chunk(twin.row, len(twin.prompt), 0, Samples.TOKEN, source=leader.row))
        self.sample(twin, 0)

    def request(self, life: Life) -> None:
        self.take_row(life, start=0)
        self.fill(life)

    def take_row(self, life: Life, start: int) -> None:
        life.row = self.rng.choice([row for row, other in enumerate(self.rows) if other is None])
        self.rows[life.row], life.planned = life, start
        tokens = (*life.prompt, *life.output)
        self.joins.append(
            Join(
                *(life.row, id(life), life.epoch, tokens, len(life.prompt), tuple(life.table), start),
                *(life.params, life.seed, frozenset()),
            )
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_the_oracle(seed: int, depth: int) -> None:
    scene = Scene(Random(seed), depth)
    scene.run()
    for life in scene.lives:
        assert life.output == oracle(life.prompt, life.params, life.seed, frozenset(), life.params.max_tokens)
