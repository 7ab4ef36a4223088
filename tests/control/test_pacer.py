"""The pacer keeps its target in whole blocks or in the executor's step sizes, always makes progress, and limits chunks
only where a row decodes."""

from __future__ import annotations

from control.planted_costs import PLANTED

from headway.control.costs import CostModel
from headway.control.pacer import FIRST, FLOOR, TargetPacer
from headway.values.work import Work, pairs_of


def test_the_pacer_keeps_the_target_in_whole_blocks_and_always_gets_on() -> None:
    pacer = TargetPacer(CostModel(PLANTED), 0.1, block_size=16)
    work = Work(decode=20, context=5000)
    for target in (0.1, 0.0953, 0.0871):
        pacer.target = target
        count = pacer.tokens(work, 0)
        assert count % 16 == 0
        assert CostModel(PLANTED).step(work._replace(tokens=count, pairs=pairs_of(0, count), chunks=1)) <= target
    pacer.target = 0.001
    assert pacer.tokens(work, 0) == FLOOR
    assert not pacer.has_slot(work)
    assert pacer.has_slot(Work(decode=2)), "one row alone breaks the target: two are hardly worse"
    pacer.target = None
    assert pacer.tokens(work, 0) > 1 << 20
    assert pacer.has_slot(work)


def test_a_second_chunk_gets_what_the_first_leaves() -> None:
    costs, target = CostModel(PLANTED), 0.1
    pacer, work = TargetPacer(costs, target, block_size=16), Work(decode=20, context=5000)
    alone = pacer.tokens(work, 3000)
    work = work._replace(tokens=32, pairs=pairs_of(0, 32), chunks=1)
    count = pacer.tokens(work, 3000)
    assert 0 < count < alone
    both = work._replace(tokens=32 + count, pairs=work.pairs + pairs_of(3000, count), chunks=2)
    assert costs.step(both) <= target
    assert pacer.tokens(work._replace(tokens=5000, pairs=pairs_of(0, 5000)), 0) == 0, "the step is full"
    learning = TargetPacer(CostModel(), target)
    assert learning.tokens(Work(tokens=100, decode=1, chunks=1), 0) == FIRST - 100
    assert learning.tokens(Work(tokens=500, decode=1, chunks=1), 0) == 0


def test_the_pacer_limits_no_chunk_where_no_row_decodes() -> None:
    assert TargetPacer(CostModel(PLANTED), 0.1).tokens(Work(), 0) > 1 << 20


def test_the_pacer_begins_small_while_nothing_is_known() -> None:
    pacer = TargetPacer(CostModel(), 0.1)
    assert pacer.tokens(Work(decode=1), 0) == FIRST
    assert pacer.has_slot(Work(decode=1000))


def test_the_tighter_of_target_and_objective_counts() -> None:
    costs, work = CostModel(PLANTED), Work(decode=20, context=5000)
    without = TargetPacer(costs, None)
    assert without.tokens(work, 0) > 1 << 20
    assert without.tokens(work, 0, 0.1) == TargetPacer(costs, 0.1).tokens(work, 0) < 1 << 20
    assert TargetPacer(costs, 0.1).tokens(work, 0, 0.2) == TargetPacer(costs, 0.1).tokens(work, 0)
    assert TargetPacer(costs, 0.2).tokens(work, 0, 0.1) == TargetPacer(costs, 0.1).tokens(work, 0)


def test_a_step_has_one_of_the_sizes_that_it_would_be_padded_to() -> None:
    costs, sizes = CostModel(PLANTED), (64, 256, 360, 512, 1024, 4096)
    work = Work(decode=21, context=5000)
    found = set()
    for target in (0.06, 0.0871, 0.1, 0.12, 0.14):
        most = work.decode + costs.chunk_within(target, work, 0)
        size = work.decode + TargetPacer(costs, target, 16, sizes).tokens(work, 0)
        assert size == max(size for size in sizes if size <= most), "the largest that keeps the target"
        found.add(size)
    assert len(found) > 1


def test_padding_that_is_there_anyway_is_filled() -> None:
    sizes = (64, 96, 128)
    tight = TargetPacer(CostModel(PLANTED), 0.001, 16, sizes)
    assert tight.tokens(Work(decode=90, context=5000), 0) == 128 - 90, "FLOOR tokens would be padded to 128"
    assert tight.tokens(Work(decode=96, context=5000), 0) == 128 - 96
    assert tight.tokens(Work(decode=200), 0) == FLOOR, "larger than any size"


def test_a_second_chunk_ends_at_a_size_too() -> None:
    work = Work(tokens=40, pairs=pairs_of(0, 40), chunks=1, decode=20, context=5000)
    left = CostModel(PLANTED).chunk_within(0.1, work, 0)

    def tokens(*sizes: int) -> int:
        return TargetPacer(CostModel(PLANTED), 0.1, 16, sizes).tokens(work, 0)

    assert left > 100
    assert tokens(32, 60 + left - 10, 60 + left + 10) == left - 10
    assert tokens(32, 67, 4096) == 7, "fewer than FLOOR: the first chunk has progressed"
    assert tokens(32, 60, 4096) == 0, "the step has a size, and the next one is too large"
    assert tokens(32, 60 + left + 10) == left + 10, "it is padded so far"
