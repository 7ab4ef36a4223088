"""Every number format on a real device: logits have the same bits alone, in any batch, any chunks and any bucket.

Two layers of well-known and of odd shapes with made-up weights: every kernel and every product that a whole model has.
Bits that are alike may be alike wrong, so logits are also held against plain arithmetic in float64.
"""

from __future__ import annotations

import random

import pytest
import torch

from cuda_kit import IS_CUDA, CudaDesk
from cuda_shapes import CASES, FORMATS, FP8, INT8, MOST_ERROR, PLAIN, SHAPES, desk_of, prompt_of
from headway.values.plan import Chunk, Samples
from plain_decoder import plain_logits

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="bits of bfloat16 products are the device's own")

LENGTHS = (40, 300, 700, 1500, 2500)


@pytest.fixture(scope="module", params=CASES)
def kinds(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def desk(kinds: str) -> CudaDesk:
    shape, name = kinds.split()
    return desk_of(shape, FORMATS[name], num_rows=300, num_blocks=6000, max_tokens=4096, max_len=4096)


@pytest.fixture(scope="module", params=[f"{shape} {kind}" for shape in SHAPES for kind in ("e4m3", "int8")])
def byte_cells(request: pytest.FixtureRequest) -> CudaDesk:
    shape, kind = request.param.split()
    kinds = (PLAIN, FP8 if kind == "e4m3" else INT8)
    return desk_of(shape, kinds, num_rows=4, num_blocks=300, max_tokens=2048, max_len=4096)


def fill(desk: CudaDesk, row: int, tokens: list[int], sizes: list[int], others: dict[int, list[int]]) -> torch.Tensor:
    """Logits behind `tokens`, computed in chunks of these sizes beside other rows' prompts, whole in each step."""
    tables = {other: desk.blocks(len(mine) + 16) for other, mine in others.items()}
    table = desk.blocks(len(tokens) + 16)
    start = 0
    for size in sizes:
        end = start + size
        is_last = end == len(tokens)
        joins = [desk.join(other, mine, table=tables[other]) for other, mine in others.items()]
        joins += [desk.join(row, tokens, table=table)] if not start else []
        chunks = [Chunk(other, 0, len(mine), Samples.TOKEN) for other, mine in others.items()]
        chunks.append(Chunk(row, start, size, Samples.TOKEN if is_last else Samples.NONE))
        result = desk.step(chunks=chunks, joins=joins)
        assert not result.failed
        start = end
    logits = desk.logits()[len(others)].clone()
    desk.free += [*table, *(block for blocks in tables.values() for block in blocks)]
    return logits


@pytest.mark.parametrize("num", LENGTHS)
def test_chunks_and_other_rows_change_no_bit(desk: CudaDesk, num: int) -> None:
    tokens = prompt_of(num, num)
    alone = fill(desk, 0, tokens, [num], {})
    assert torch.isfinite(alone).all()
    third = num // 3
    assert torch.equal(alone, fill(desk, 7, tokens, [third, num - third], {}))
    company = {row: prompt_of(20 + 37 * row, row) for row in range(1, 5)}
    assert torch.equal(alone, fill(desk, 9, tokens, [third, third, num - 2 * third], company))


@pytest.mark.parametrize("num", [40, 1500])
def test_logits_are_those_of_plain_arithmetic_within_their_formats_rounding(
    desk: CudaDesk, kinds: str, num: int
) -> None:
    tokens = prompt_of(num, num + 2)
    wanted = plain_logits(desk.spec, desk.weights, tokens)[0].cpu()
    error = float((fill(desk, 0, tokens, [num], {}) - wanted).norm() / wanted.norm())
    print(f"{kinds}, {num} tokens: {error:.1e}")
    assert error < MOST_ERROR[kinds.split()[1]]


@pytest.mark.parametrize("num", LENGTHS)
def test_decode_has_the_bits_of_prefill_in_every_bucket(desk: CudaDesk, num: int) -> None:
    tokens = prompt_of(num, num + 1)
    alone = fill(desk, 0, tokens, [num], {})
    for company in (0, 3, 20, 40, 63, 127, 255):
        table = desk.blocks(num + 16)
        joins = [desk.join(7, tokens, table=table)]
        desk.step(chunks=[Chunk(7, 0, num - 1, Samples.NONE)], joins=joins)
        # Joined anew with all but the last token computed: the next step decodes the last one.
        again = desk.join(7, tokens, table=table, start=num - 1)
        others = [row for row in range(10, 10 + company)]
        tables = {row: desk.blocks(48) for row in others}
        fillers = [
            desk.join(row, prompt_of(row % 40 + 2, row), table=tables[row], start=row % 40 + 1) for row in others
        ]
        assert not desk.step([*others, 7], joins=[again, *fillers]).failed
        assert torch.equal(alone, desk.logits()[company]), (num, company)
        desk.free += [*table, *(block for blocks in tables.values() for block in blocks)]


def test_attention_over_bytes_adds_up_in_one_order_in_both_kernels(byte_cells: CudaDesk) -> None:
    """Logits seldom show it: rounding hides most of what another order changes, so attention's outputs are compared."""
    desk, mixed = byte_cells, byte_cells.executor.graphs.step.decoder._mixed  # type: ignore[attr-defined]
    for seed in range(20):
        num = random.Random(seed).randint(20, 1200)
        tokens, table = prompt_of(num, seed), desk.blocks(num + 16)
        desk.step(chunks=[Chunk(0, 0, num, Samples.TOKEN)], joins=[desk.join(0, tokens, table=table)])
        filled = mixed[num - 1].clone()
        desk.step([1], joins=[desk.join(1, tokens, table=table, start=num - 1)])
        assert torch.equal(mixed[0], filled), num
        desk.free += [*table]
