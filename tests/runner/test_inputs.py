"""Plans become tensors: the batch, and which row each line of logits belongs to."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from headway.runner.inputs import StepInputs, Verify, build
from headway.runner.slots import Slots
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Join, Samples, StepPlan

T, N, A = Samples.TOKEN, Samples.NONE, Samples.VERIFY


def _slots() -> Slots:
    """Row 0 decodes at position 6 (blocks 9, 5); row 1 has 9 tokens to compute (2, 4, 6); row 2 shares its start."""
    slots = Slots(num_rows=4, num_blocks=20, block_size=4, max_len=32, vocab_size=100)
    greedy = SamplingParams(temperature=0.0)
    for row, tokens, table, start in (
        (0, range(10, 17), (9, 5), 6),
        (1, range(20, 29), (2, 4, 6), 0),
        (2, range(20, 29), (2, 4, 7), 9),
    ):
        slots.join(Join(row, row, 0, tuple(tokens), 3, table, start, greedy, 0, frozenset()))
    return slots


def _build(slots: Slots, decode: Sequence[int], *chunks: Chunk) -> StepInputs:
    return build(StepPlan(0, array("i", decode), chunks), slots)


def _columns(inputs: StepInputs) -> dict[str, list[int]]:
    assert inputs.batch is not None
    names = ("tokens", "positions", "slot_map", "row_of", "tables", "query_start", "context", "sample_index")
    return {name: getattr(inputs.batch, name).tolist() for name in names}


def test_a_mixed_plan_looks_as_drawn() -> None:
    inputs = _build(_slots(), [0], Chunk(1, 0, 6, N))
    assert _columns(inputs) == {
        "tokens": [16, 20, 21, 22, 23, 24, 25],
        "positions": [6, 0, 1, 2, 3, 4, 5],
        "slot_map": [22, 8, 9, 10, 11, 16, 17],
        "row_of": [0, 1, 1, 1, 1, 1, 1],
        "tables": [[9, 5], [2, 4]],
        "query_start": [0, 1, 7],
        "context": [7, 6],
        "sample_index": [0],
    }
    assert (inputs.rows.tolist(), inputs.positions.tolist(), inputs.index.tolist()) == ([0], [7], [0])
    assert inputs.computed == [Chunk(1, 0, 6, N)]
    assert not inputs.failed


def test_dtypes_are_what_the_kernels_take() -> None:
    batch = _build(_slots(), [0], Chunk(1, 0, 9, T)).batch
    assert batch is not None
    wide = (batch.tokens, batch.positions, batch.slot_map, batch.sample_index)
    narrow = (batch.row_of, batch.tables, batch.query_start, batch.context)
    assert {str(tensor.dtype) for tensor in wide} == {"int64"}
    assert {str(tensor.dtype) for tensor in narrow} == {"int32"}
    assert all(tensor.flags.c_contiguous for tensor in (*wide, *narrow))


def test_a_later_chunk_starts_where_its_row_is() -> None:
    slots = _slots()
    slots.length[1] = 6
    inputs = _build(slots, [], Chunk(1, 6, 3, T))
    columns = _columns(inputs)
    assert (columns["tokens"], columns["positions"]) == ([26, 27, 28], [6, 7, 8])
    assert columns["slot_map"] == [18, 19, 24]
    assert columns["sample_index"] == [2]
    assert (inputs.rows.tolist(), inputs.positions.tolist(), inputs.index.tolist()) == ([1], [9], [0])


def test_a_fork_computes_nothing_and_reads_the_line_of_its_source() -> None:
    inputs = _build(_slots(), [0], Chunk(2, 9, 0, T, source=1), Chunk(1, 0, 9, N))
    columns = _columns(inputs)
    assert columns["context"] == [7, 9]
    assert columns["sample_index"] == [0, 9]  # the source samples nothing itself, and still goes to the head
    assert inputs.rows.tolist() == [0, 2]
    assert inputs.positions.tolist() == [7, 9]
    assert inputs.index.tolist() == [0, 1]


def test_a_fork_may_read_a_decoding_row() -> None:
    inputs = _build(_slots(), [0], Chunk(2, 9, 0, T, source=0))
    assert (inputs.rows.tolist(), inputs.index.tolist()) == ([0, 2], [0, 0])


def test_drafts_are_computed_behind_the_known_tokens_and_all_go_to_the_head() -> None:
    inputs = _build(_slots(), [], Chunk(1, 0, 9, T), Chunk(0, 6, 2, A, drafts=(77,)))
    columns = _columns(inputs)
    assert columns["tokens"][9:] == [16, 77]
    assert columns["positions"][9:] == [6, 7]
    assert columns["sample_index"] == [8, 9, 10]
    assert inputs.verifies == [Verify(row=0, base=7, first=1, drafts=(77,))]
    assert inputs.rows.tolist() == [1]


def test_all_positions_without_drafts_yield_the_last_token() -> None:
    inputs = _build(_slots(), [], Chunk(1, 0, 9, A))
    assert inputs.verifies == []
    assert (inputs.rows.tolist(), inputs.positions.tolist()) == ([1], [9])


def test_nothing_to_compute_makes_no_batch() -> None:
    assert _build(_slots(), []).batch is None


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (Chunk(3, 0, 1, T), "no request has joined it"),
        (Chunk(9, 0, 1, T), "row 9 does not exist"),
        (Chunk(1, 0, 9, A, num_drafts=1), "draft tokens that the device holds"),
        (Chunk(1, 0, 10, T), "9 tokens are known"),
        (Chunk(0, 6, 3, A, drafts=(1, 2)), "covers 8"),
        (Chunk(1, -1, 2, T), "cannot compute tokens -1 to 1"),
        (Chunk(1, 4, 5, T), "cannot start at token 4: 0 tokens are computed"),
        (Chunk(2, 9, 0, T), "names no row to sample from"),
        (Chunk(2, 9, 0, T, source=3), "row 3, which computes nothing"),
        (Chunk(0, 6, 2, T, drafts=(1,)), "sample at all positions"),
        (Chunk(0, 6, 1, A, drafts=(1,)), "must follow its 7 known tokens"),
        (Chunk(0, 6, 2, A, drafts=(100,)), "token ids 100 to 100"),
    ],
)
def test_a_chunk_that_cannot_run_is_left_out_with_its_reason(chunk: Chunk, reason: str) -> None:
    other = 0 if chunk.row == 1 else 1
    beside = Chunk(1, 0, 9, T) if other else Chunk(0, 6, 1, T)
    inputs = _build(_slots(), [], chunk, beside)
    assert list(inputs.failed) == [chunk.row]
    assert reason in inputs.failed[chunk.row]
    assert inputs.rows.tolist() == [other]


def test_decode_rows_that_cannot_run_are_left_out_with_their_reasons() -> None:
    slots = _slots()
    slots.length[0], slots.known[0] = 8, 9  # its table is full
    inputs = _build(slots, [0, 3, 2, 1, -1, 4])
    assert inputs.batch is None
    reasons = {
        **{0: "covers 8", 1: "0 tokens are computed, 9 are known", 2: "9 tokens are computed, 9 are known"},
        **{3: "no request", -1: "row -1 does not exist", 4: "rows are 0 to 3"},
    }
    assert inputs.failed.keys() == reasons.keys()
    assert all(reasons[row] in reason for row, reason in inputs.failed.items())


def test_the_tables_are_as_wide_as_the_longest_row_needs() -> None:
    slots = _slots()
    slots.length[1], slots.known[1] = 8, 9
    batch = _build(slots, [0, 1]).batch
    assert batch is not None
    assert np.array_equal(batch.tables, [[9, 5, 0], [2, 4, 6]])
