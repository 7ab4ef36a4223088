"""The calendar of stop tokens: by tokens; paused steps do not count."""

from __future__ import annotations

from array import array

from headway.engine.stops import StopCalendar
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Join, Samples, StepPlan


def _join(row: int, id: int, given: int = 0) -> Join:
    return Join(row, id, 0, (1, *[2] * given), 1, (), 0, SamplingParams(), 0, frozenset())


def _run(calendar: StopCalendar, plans: list[tuple[list[int], list[Join], list[int]]]) -> list[list[int]]:
    """Of each plan: rows that decode, joins that sample at once, rows that leave."""
    return [
        calendar.rows(
            StepPlan(
                id=id,
                decode=array("i", decode),
                chunks=[Chunk(join.row, 0, 1, Samples.TOKEN) for join in joins],
                joins=joins,
                leaves=leaves,
            )
        )
        for id, (decode, joins, leaves) in enumerate(plans)
    ]


def test_a_row_stops_after_so_many_tokens() -> None:
    calendar = StopCalendar({7: 3, 8: 2})
    plans = [([], [_join(0, 7), _join(1, 8)], []), ([0, 1], [], []), ([0], [], [1]), ([], [], [0])]
    assert _run(calendar, plans) == [[], [1], [0], []]


def test_paused_steps_do_not_count() -> None:
    calendar = StopCalendar({7: 4, 8: 6})
    first = ([], [_join(0, 7), _join(1, 8)], [])
    rest = [([0], [], []), ([1], [], []), ([0], [], []), ([0, 1], [], []), ([1], [], [0]), ([1], [], []), ([1], [], [])]
    # Row 0 gets tokens in plans 0, 1, 3 and 4; row 1 in 0, 2, 4, 5, 6 and 7.
    assert _run(calendar, [first, *rest]) == [[], [], [], [], [0], [], [], [1]]


def test_a_resumed_request_counts_the_tokens_it_had() -> None:
    calendar = StopCalendar({7: 4})
    plans = [([], [_join(0, 7)], []), ([0], [], []), ([], [], [0]), ([], [_join(3, 7, given=2)], []), ([3], [], [])]
    assert _run(calendar, plans) == [[], [], [], [], [3]]
