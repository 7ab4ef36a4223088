"""A KV store that notices reads of wrong cells: for tests and the soak (`--debug-kv`), not for service.

Cells hold NaN until they are written and again once their block is released. Besides, each cell records a hash of
the tokens it was computed for: a row that would read a cell of another prefix fails before it computes, with the cell
in the reason. It trusts what plans and `write` say they write.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.kernels.kv_format import INT8
from headway.runner.kvstore import KVStore
from headway.runner.slots import Slots
from headway.values.plan import BlockCopy, BlockRef, StepPlan, Tier

log = logging.getLogger(__name__)

_ODD = 0x9E3779B97F4A7C15  # its powers are the weights of the positions; odd, so that none of them is lost mod 2**64


class DebugKVStore(KVStore):
    """`_prefix` of a cell is a hash of the tokens up to its own, 0 while it holds nothing."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._nan = 0xFF if self.data.dtype == INT8.dtype else float("nan")  # four such bytes are a NaN scale
        self._prefix = {
            Tier.DEVICE: np.zeros((self.num_blocks, self.block_size), np.uint64),
            Tier.HOST: np.zeros((self.host_blocks, self.block_size), np.uint64),
        }
        self.data.fill(self._nan)

    def touch(self) -> None:
        """Nothing to do: every page was written when this was made."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        super().copy(copies)
        for copy in copies:
            self._prefix[copy.dst.tier][copy.dst.id] = self._prefix[copy.src.tier][copy.src.id]

    def write(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        super().write(block, data, tokens, start)
        known = prefix_numbers(np.array(tokens[: start + self.block_size], np.int64))[start:]
        self._prefix[Tier.DEVICE][block] = 0
        self._prefix[Tier.DEVICE][block, : len(known)] = known

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._block(BlockRef(Tier.DEVICE, block)).fill(self._nan)
            self._prefix[Tier.DEVICE][block] = 0

    def audit(self, plan: StepPlan, slots: Slots) -> dict[int, str]:
        failed: dict[int, str] = {}
        cells = self._prefix[Tier.DEVICE]
        for row, start, tokens in _writes(plan, slots):
            prefix = prefix_numbers(tokens)
            places = np.arange(len(tokens))
            blocks = slots.tables[row, places // self.block_size]
            places %= self.block_size
            wrong = np.flatnonzero(cells[blocks, places][:start] != prefix[:start])
            if wrong.size:
                cell = int(wrong[0])
                is_empty = cells[blocks[cell], places[cell]] == 0
                what = "holds nothing" if is_empty else "was computed for other tokens"
                name = f"cell {cell} (block {blocks[cell]}, place {places[cell]})"
                failed[row] = f"row {row} reads {name}, which {what}; {wrong.size} of its {start} cells are wrong"
                log.error("plan %d: %s", plan.id, failed[row])
            else:
                cells[blocks[start:], places[start:]] = prefix[start:]
        return failed


def prefix_numbers(tokens: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """For each position a hash, never 0, of all tokens up to it: equal prefixes have equal hashes."""
    weights = np.cumprod(np.full(len(tokens), _ODD, np.uint64))
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * weights) | np.uint64(1)


def _writes(plan: StepPlan, slots: Slots) -> Iterator[tuple[int, int, NDArray[np.integer[Any]]]]:
    """For each sound row that computes: itself, the first cell it writes, and its tokens up to the last one."""
    for row in plan.decode:
        if 0 <= row < slots.num_rows and slots.length[row] < slots.room[row]:
            start = int(slots.length[row])
            yield row, start, slots.tokens[row, : start + 1]
    for chunk in plan.chunks:
        end = chunk.start + chunk.count
        if chunk.count and 0 <= chunk.row < slots.num_rows and 0 <= chunk.start < end <= slots.room[chunk.row]:
            known = slots.tokens[chunk.row, : end - len(chunk.drafts)]
            yield chunk.row, chunk.start, np.concatenate((known, np.array(chunk.drafts, known.dtype)))
