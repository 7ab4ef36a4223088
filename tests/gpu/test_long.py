"""Contexts of up to 100,000 tokens on a real device: where attention's segments change size, bits stay.

One long prompt is computed twice, in chunks as long as a step takes and in others beside other rows. Each layer's KV is
a function of all attention before it, at every position: it is compared byte for byte. Then single positions on either
side of the borders are computed again, as chunks and as decode rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch

from cuda_kit import IS_CUDA, CudaDesk
from cuda_shapes import FORMATS, MOST_ERROR, desk_of, prompt_of
from headway.kernels.cuda.attention import segment_ends
from headway.values.plan import Chunk, Samples
from plain_decoder import plain_logits

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="bits of bfloat16 products are the device's own")

CASES = {
    "llama-3.1-8b plain": 100_000,
    "llama-3.1-8b cells8": 34_000,
    "llama-3.2-1b half": 66_000,
    "smollm2-135m float32": 34_000,
    "smollm2-135m int8": 100_000,
    "heads-96 plain": 34_000,
    "heads-256 cells8": 34_000,
    "heads-256 plain": 34_000,
    "groups-7 plain": 34_000,
    "groups-7 int8": 66_000,
}
STEP = 4096
OTHERS = 3  # rows beside the long one
ODD_SIZES = (1000, 37, 2500, 1, 3300, 16, 777)


@dataclass(frozen=True, slots=True)
class Long:
    """A prompt whose KV lies in `table` when computed alone, and in `other` when computed beside other rows."""

    kinds: str
    desk: CudaDesk
    tokens: list[int]
    table: tuple[int, ...]
    other: tuple[int, ...]

    def borders(self) -> list[int]:
        """Lengths of contexts on both sides of where segments change their size, and the whole."""
        num = len(self.tokens)
        ends = [end for end in segment_ends(num) if end < num]
        return [*(end + more for end in ends for more in (-1, 0, 1, 16)), num]


def compute(desk: CudaDesk, row: int, tokens: list[int], table: Sequence[int], sizes: Sequence[int], num: int) -> None:
    """Compute the row's prompt in chunks of these sizes, over and over, each beside `num` other prompts."""
    start = 0
    for size in cycle(sizes):
        end = min(start + size, len(tokens))
        others = {row + 1 + i: prompt_of(5 + (start + 41 * i) % 190, start + i) for i in range(num)}
        tables = {other: desk.blocks(len(mine) + 16) for other, mine in others.items()}
        joins = [desk.join(other, mine, table=tables[other]) for other, mine in others.items()]
        joins += [desk.join(row, tokens, table=table)] if not start else []
        chunks = [Chunk(other, 0, len(mine), Samples.TOKEN) for other, mine in others.items()]
        assert not desk.step(chunks=[*chunks, Chunk(row, start, end - start, Samples.NONE)], joins=joins).failed
        desk.free += [block for blocks in tables.values() for block in blocks]
        start = end
        if start == len(tokens):
            return


@pytest.fixture(scope="module", params=CASES)
def long(request: pytest.FixtureRequest) -> Long:
    kinds = request.param
    shape, name = kinds.split()
    num = CASES[kinds]
    blocks = 2 * (num // 16 + 2) + 200
    desk = desk_of(shape, FORMATS[name], num_rows=64, num_blocks=blocks, max_tokens=STEP, max_len=num + 64)
    tokens = prompt_of(num, num)
    made = Long(kinds, desk, tokens, desk.blocks(num + 16), desk.blocks(num + 16))
    compute(desk, 0, tokens, made.table, [STEP], 0)
    compute(desk, 1, tokens, made.other, ODD_SIZES, OTHERS)
    return made


def cells(long: Long, table: Sequence[int], first: int = 0) -> list[torch.Tensor]:
    """Bytes of all cells in the prompt's full blocks from the one of `first` on, by layer and kind."""
    blocks = torch.tensor(table[first // 16 : len(long.tokens) // 16], device="cuda")
    layers = long.desk.executor._kv.layers  # type: ignore[attr-defined]
    kinds = [kind for kv in layers for kind in (kv.keys, kv.values, kv.scales) if kind is not None]
    return [kind.view(torch.uint8)[blocks] for kind in kinds]


def same(long: Long) -> bool:
    return all(map(torch.equal, cells(long, long.table), cells(long, long.other)))


def behind(long: Long, num: int, size: int) -> torch.Tensor:
    """Logits behind `num` tokens, of which the last `size` are a chunk."""
    join = long.desk.join(5, long.tokens[:num], table=long.table, start=num - size)
    assert not long.desk.step(chunks=[Chunk(5, num - size, size, Samples.TOKEN)], joins=[join]).failed
    return long.desk.logits()[0].clone()


def test_chunks_and_other_rows_change_no_cell_of_a_long_context(long: Long) -> None:
    assert same(long)
    assert not torch.equal(cells(long, long.table)[0][0], cells(long, long.table)[0][1]), "cells hold something"


def test_positions_at_borders_have_the_same_bits_in_chunks_of_any_size_and_decoded_in_any_company(long: Long) -> None:
    desk = long.desk
    for num in long.borders():
        wanted = behind(long, num, 1)
        assert torch.isfinite(wanted).all()
        for size in (2, 300, min(num, 3000)):
            assert torch.equal(wanted, behind(long, num, size)), (num, size)
        for company in (0, 1, 20, 60):
            # The first of them is as long as the prompt, others are short.
            joins = [desk.join(0, long.tokens, table=long.other, start=len(long.tokens) - 1)] if company else []
            tables = [desk.blocks(32) for _ in range(1, company)]
            for i, table in enumerate(tables):
                joins.append(desk.join(i + 1, prompt_of(i % 20 + 2, i), table=table, start=i % 20 + 1))
            joins.append(desk.join(63, long.tokens[:num], table=long.table, start=num - 1))
            assert not desk.step([join.row for join in joins], joins=joins).failed
            assert torch.equal(wanted, desk.logits()[company]), (num, company)
            desk.free += [block for table in tables for block in table]
    assert same(long), "what was computed again left the same cells"


def test_logits_of_a_long_context_are_those_of_plain_arithmetic(long: Long) -> None:
    num = min(len(long.tokens), 33_500)
    wanted = plain_logits(long.desk.spec, long.desk.weights, long.tokens[:num])[0].cpu()
    error = float((behind(long, num, 1) - wanted).norm() / wanted.norm())
    print(f"{long.kinds}, {num} tokens: {error:.1e}")
    assert error < MOST_ERROR[long.kinds.split()[1]]
