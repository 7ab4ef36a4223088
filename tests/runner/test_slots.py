"""Rows over a request's life, and the joins and growths that a row refuses."""

from typing import Any

import numpy as np
import pytest

from headway.errors import RowFailed
from headway.runner.slots import Slots
from headway.values.params import SamplingParams
from headway.values.plan import Grow, Join

GREEDY = SamplingParams(temperature=0.0)


def _slots() -> Slots:
    return Slots(num_rows=3, num_blocks=20, block_size=4, max_len=18, vocab_size=50)


def _join(**changes: Any) -> Join:
    given: dict[str, Any] = {
        **{"row": 1, "id": 9, "epoch": 0, "tokens": (1, 2, 3, 4, 5), "num_prompt": 4, "table": (7, 8)},
        **{"start": 4, "params": GREEDY, "seed": -3, "stop_ids": frozenset({6})},
    }
    return Join(**{**given, **changes})


def test_a_join_fills_every_column_of_its_row() -> None:
    slots = _slots()
    slots.join(_join(params=SamplingParams(temperature=0.0, min_tokens=2)))
    assert slots.tokens[1, :5].tolist() == [1, 2, 3, 4, 5]
    assert slots.tables[1].tolist() == [7, 8, 0, 0, 0]
    assert (slots.length[1], slots.known[1], slots.room[1], slots.stops_from[1]) == (4, 5, 8, 6)
    assert slots.stop_ids[1] == {6}
    assert (slots.request(1).id, slots.request(1).seed) == (9, -3)
    assert slots.room.tolist() == [0, 8, 0]


def test_the_next_request_in_a_row_finds_nothing_of_the_last() -> None:
    slots = _slots()
    slots.join(_join(table=(7, 8, 9, 10), start=5))
    slots.fail(1, "broke")
    slots.join(_join(tokens=(2, 2), num_prompt=2, table=(3,), start=0, stop_ids=frozenset()))
    assert slots.tables[1].tolist() == [3, 0, 0, 0, 0]
    assert (slots.length[1], slots.known[1], slots.room[1]) == (0, 2, 4)
    assert slots.stop_ids[1] == frozenset()
    assert slots.request(1).num_prompt == 2


def test_a_row_that_left_is_out_of_service_until_it_is_joined() -> None:
    slots = _slots()
    slots.join(_join())
    slots.leave(1)
    slots.leave(1)
    assert slots.room[1] == 0
    with pytest.raises(RowFailed, match="no request has joined it"):
        slots.request(1)


def test_a_failed_row_keeps_its_first_reason() -> None:
    slots = _slots()
    slots.join(_join())
    slots.fail(1, "first")
    slots.fail(1, "second")
    assert slots.room[1] == 0
    with pytest.raises(RowFailed, match="first"):
        slots.request(1)


def test_growth_appends_and_swaps() -> None:
    slots = _slots()
    slots.join(_join())
    slots.grow(Grow(1, 2, (11, 12)))
    assert (slots.tables[1, :4].tolist(), slots.room[1]) == ([7, 8, 11, 12], 16)
    slots.grow(Grow(1, 1, (15,)))
    assert (slots.tables[1, :4].tolist(), slots.room[1]) == ([7, 15, 11, 12], 16)
    slots.grow(Grow(1, 3, (16, 17)))
    assert (slots.tables[1].tolist(), slots.room[1]) == ([7, 15, 11, 16, 17], 18)


@pytest.mark.parametrize(
    ("grow", "message"),
    [
        (Grow(0, 0, (1,)), "no request has joined"),
        (Grow(1, 3, (1,)), "entries 3 to 4 are set; it has 2 and room for 5"),
        (Grow(1, -1, (1,)), "entries -1 to 0"),
        (Grow(1, 2, (1, 2, 3, 4)), "room for 5"),
        (Grow(1, 2, (20,)), "block ids 20 to 20 were given; allowed: 0 to 19"),
        (Grow(3, 0, (1,)), "row 3 does not exist; rows are 0 to 2"),
        (Grow(-2, 0, (1,)), "row -2 does not exist"),
    ],
)
def test_growth_that_makes_no_sense_is_refused_and_changes_nothing(grow: Grow, message: str) -> None:
    slots = _slots()
    slots.join(_join())
    before = slots.tables.copy()
    with pytest.raises(RowFailed, match=message):
        slots.grow(grow)
    assert (slots.tables == before).all()
    assert slots.room.tolist() == [0, 8, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (1, 50)}, "token ids 1 to 50 were given; allowed: 0 to 49"),
        ({"tokens": (-1, 2)}, "token ids -1 to 2"),
        ({"tokens": (2**70,)}, "not 64-bit integers"),
        ({"tokens": tuple(range(19))}, "has 19 tokens; a row has room for 18"),
        ({"table": (7, 20)}, "block ids 7 to 20"),
        ({"table": (1, 2, 3, 4, 5, 6)}, "table of 6 blocks was given; a row has room for 5"),
        ({"start": 6}, "starts at token 6, with 5 tokens and 2 blocks"),
        ({"table": (7,), "start": 5}, "starts at token 5"),
        ({"start": -1}, "starts at token -1"),
        ({"num_prompt": 6}, "calls 6 of its 5 tokens the prompt"),
        ({"params": SamplingParams(logit_bias={50: 1.0})}, "token ids 50 to 50"),
        ({"row": 3}, "row 3 does not exist"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused_and_takes_no_row(changes: dict[str, Any], message: str) -> None:
    slots = _slots()
    with pytest.raises(RowFailed, match=message):
        slots.join(_join(**changes))
    assert not slots.room.any()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(temperature=0.0, frequency_penalty=-0.1),
    ],
)
def test_only_greedy_rows_with_nothing_else_are_plain(params: SamplingParams) -> None:
    slots = _slots()
    slots.join(_join(row=0))
    slots.join(_join(row=1, params=params))
    assert slots.is_plain.tolist() == [True, False, False]


def test_advance_writes_the_newest_token_of_each_row() -> None:
    slots = _slots()
    slots.join(_join(row=0))
    slots.join(_join(row=2))
    slots.advance(np.array([2, 0]), np.array([5, 5]), np.array([33, 44]))
    assert slots.tokens[[0, 2], 5].tolist() == [44, 33]
    assert slots.length.tolist() == [5, 0, 5]
    assert slots.known.tolist() == [6, 0, 6]
