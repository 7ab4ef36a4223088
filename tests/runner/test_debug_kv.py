"""The debug store: released blocks hold NaN, and a row that reads a cell of another prefix is failed by name."""

from __future__ import annotations

from array import array

import pytest
import torch
from runner.test_swap import CHEAP, NUM_TOKENS, PLENTY, SCARCE, _loaded, _run

from headway.kernels.ref_kv import widen
from headway.runner.debug_kv import DebugKVStore
from headway.runner.executor import CpuExecutor
from headway.runner.slots import Slots
from headway.values.plan import BlockCopy, BlockRef, Chunk, Grow, Join, Samples, StepPlan, Tier
from runner_kit import BLOCK, GREEDY, VOCAB, PrefixHashModel
from tiny_models import kernel_sets

KINDS = pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)


def _store(kv_dtype: str = "float32", host_blocks: int = 0) -> DebugKVStore:
    return DebugKVStore(
        layers=1, num_blocks=8, block_size=BLOCK, kv_heads=1, head_dim=2, kv_dtype=kv_dtype, host_blocks=host_blocks
    )


class Desk:
    """An executor over the debug store, and plans for it."""

    def __init__(self, host_blocks: int = 0) -> None:
        self.kv = _store(host_blocks=host_blocks)
        slots = Slots(num_rows=4, num_blocks=8, block_size=BLOCK, max_len=24, vocab_size=VOCAB)
        self.executor = CpuExecutor(PrefixHashModel(), self.kv, slots, has_thread=False)
        self._id = 0

    def run(self, decode: tuple[int, ...] = (), **fields: object):
        self.executor.submit(StepPlan(self._id, array("i", decode), **fields))  # type: ignore[arg-type]
        self._id += 1
        return self.executor.collect()

    def start(self, row: int, tokens: list[int], table: tuple[int, ...], start: int = 0, **fields: object):
        join = Join(row, row, 0, tokens, len(tokens), table, start, GREEDY, 0, frozenset())
        chunk = Chunk(row, start, len(tokens) - start, Samples.TOKEN)
        return self.run(joins=[join], chunks=[chunk], **fields)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
def test_cells_are_nan_at_first_and_again_once_released(kv_dtype: str) -> None:
    kv = _store(kv_dtype)
    assert widen(torch.from_numpy(kv.data)).isnan().all()
    kv.data.fill(0)
    kv.release([2, 5])
    is_nan = widen(torch.from_numpy(kv.data)).isnan().flatten(3).all(-1)[0, 0]
    assert is_nan.nonzero().flatten().tolist() == [2, 5]


def test_rows_that_share_grow_and_copy_as_they_should_are_left_alone() -> None:
    desk = Desk(host_blocks=2)
    tokens = [5, 6, 7, 8, 9]
    assert not desk.start(0, tokens, (3, 1)).failed
    for _ in range(3):
        assert not desk.run((0,)).failed
    assert not desk.run((0,), grows=[Grow(0, 2, (7,))]).failed
    assert not desk.start(1, [*tokens[:4], 1], (3, 2), start=4).failed, "shares the first block"
    out, back = BlockRef(Tier.HOST, 1), BlockRef(Tier.DEVICE, 6)
    copies = [BlockCopy(BlockRef(Tier.DEVICE, 2), out), BlockCopy(out, back)]
    assert not desk.run((1,), copies=copies, grows=[Grow(1, 1, (6,))], released=(2,)).failed


def test_a_row_that_reads_a_released_block_is_failed_and_says_which() -> None:
    desk = Desk()
    desk.start(0, [5, 6, 7, 8, 9], (3, 1))
    desk.start(1, [1, 2], (4,))
    result = desk.run((0, 1), released=(3,))
    assert list(result.failed) == [0]
    assert "row 0 reads cell 0 (block 3, place 0), which holds nothing" in result.failed[0]


def test_a_row_that_reads_what_another_prefix_left_is_failed_and_says_which() -> None:
    desk = Desk()
    desk.start(0, [5, 6, 7, 8, 9], (3, 1))
    result = desk.start(1, [5, 6, 7, 9, 1], (3, 2), start=4)
    assert "row 1 reads cell 3 (block 3, place 3), which was computed for other tokens" in result.failed[1]


def test_a_row_that_reads_a_cell_that_was_never_written_is_failed() -> None:
    desk = Desk()
    assert "cell 0 (block 6, place 0), which holds nothing" in desk.start(0, [1, 2, 3, 4, 5], (6, 2), start=4).failed[0]


def test_drafts_that_were_wrong_leave_cells_that_are_written_again() -> None:
    desk = Desk()
    desk.start(0, [5, 6, 7], (3, 1))
    drafts = Chunk(0, 3, 3, Samples.VERIFY, drafts=(60, 60))
    assert not desk.run(chunks=[drafts]).failed
    length = int(desk.executor._worker._slots.length[0])
    for _ in range(7 - length):
        assert not desk.run((0,)).failed


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_under_pressure_passes_and_answers_as_with_the_plain_store(kernels, depth: int) -> None:
    loaded = _loaded(kernels)
    for options in ({"caching": True}, {"swap_space_gb": 0.01, "weights": CHEAP}):
        plain, _ = _run(loaded, PLENTY)
        debug, stats = _run(loaded, SCARCE, depth=depth, debug_kv=True, **options)
        assert stats.preemptions > 0
        assert {id: output.tokens for id, output in debug.items()} == {id: out.tokens for id, out in plain.items()}
        assert all(len(output.tokens) == NUM_TOKENS for output in debug.values())
