"""The pacer keeps its target in whole blocks, always makes progress, and limits chunks only where a row decodes."""

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
