"""Chunks deep in a prompt, cut into segments that several programs compute: cut or not, logits are the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cuda_kit import DEVICE, CudaDesk, small_spec
from headway.kernels.cuda.attention import host_segment_cells, segment_cells
from headway.runner.cuda import packet
from headway.values.plan import Chunk, Samples

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

TOKENS = [(7 * i * i + 3 * i) % 131 for i in range(200)]


@triton.jit
def _sizes(lengths, out, NUM: tl.constexpr):
    i = tl.arange(0, NUM)
    tl.store(out + i, segment_cells(tl.load(lengths + i)))


def test_host_and_device_agree_about_segments() -> None:
    lengths = [1, 64, 512, 513, 1024, 1025, 2048, 2049, 8192, 8193, 32768, 32769, 65536, 65537, 100_000, 131_072]
    given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(given)
    _sizes[(1,)](given, out, NUM=len(lengths))
    assert out.tolist() == [host_segment_cells(length) for length in lengths]


def logits(parts: int, counts: list[int]) -> torch.Tensor:
    """Behind 200 tokens, read as 120 and 80, in company of a short prompt."""
    desk = CudaDesk(small_spec(layers=1), num_rows=16)
    shape = desk.executor._shape  # type: ignore[attr-defined]
    assert shape.parts >= 8
    desk.executor._shape = replace(shape, busy=9, parts=parts)  # type: ignore[attr-defined]
    cut = packet._cut

    def count(*args: object) -> list[int]:
        words = cut(*args)  # type: ignore[arg-type]
        counts.append(sum(segment >= 0 for segment in words[4::8]))
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packet, "_DEEP", 100)
        patch.setattr(packet, "_cut", count)
        desk.step(chunks=[Chunk(0, 0, 120, Samples.NONE)], joins=[desk.join(0, TOKENS, room=210)])
        chunks = [Chunk(1, 0, 9, Samples.TOKEN), Chunk(0, 120, 80, Samples.TOKEN)]
        assert not desk.step(chunks=chunks, joins=[desk.join(1, TOKENS[:9])]).failed
    return desk.logits()[:2].clone()


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    counts: list[int] = []
    found = logits(0, counts)
    assert counts == [0, 0]
    return found


@pytest.mark.parametrize(("parts", "cut"), [(3, 3), (8, 6)])
def test_cut_chunks_have_the_bits_of_whole_ones(whole: torch.Tensor, parts: int, cut: int) -> None:
    counts: list[int] = []
    assert torch.equal(logits(parts, counts), whole)
    assert counts[1] == cut
