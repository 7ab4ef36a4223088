"""Groups of small integers handed out as they are stored: the same weights as the dequantizer's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gguf_files import Entry, draft, tiny_model
from headway.modelfile.dequant import dequantize
from headway.modelfile.gguf import GGUFFile
from headway.modelfile.gguf_model import iter_grouped, iter_tensors
from headway.modelfile.groups import Groups, read_groups

KINDS = {"Q4_0": 2, "Q4_1": 3, "Q4_K": 12, "Q5_0": 6, "Q5_1": 7, "Q5_K": 13, "Q6_K": 14, "Q8_0": 8}
STEPS = {
    "Q5_0": (0,),
    "Q4_0": (0,),
    "Q8_0": (0,),
    "Q6_K": (208,),
}  # where a block has its float16 numbers; else 0 and 2
FLOORLESS = ("Q5_0", "Q6_K", "Q8_0")


def random_blocks(kind: str, count: int, seed: int) -> bytes:
    """Blocks with sensible float16 steps; the other bytes are whatever comes."""
    rng = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for start in STEPS.get(kind, (0, 2)):
        blocks[:, start : start + 2] = rng.normal(scale=0.1, size=(count, 1)).astype("<f2").view(np.uint8)
    return blocks.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_the_weights_of_the_dequantizer(kind: str) -> None:
    columns = 768
    block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = random_blocks(kind, 50 * columns // block_size, seed=3)
    groups = read_groups(memoryview(raw), kind, (50, columns))
    assert groups is not None
    assert groups.shape == (50, columns)
    assert groups.q.dtype == np.uint8
    assert groups.size == (32 if kind.startswith("Q4") else 16)
    most = {"Q5_0": 112 + 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 96 + 63, "Q8_0": 255}
    assert groups.q.max() == most.get(kind, 15)
    assert groups.d.shape == (50, columns // groups.size)
    assert (groups.m is None) == (kind in FLOORLESS)
    np.testing.assert_array_equal(groups.floats(), dequantize(raw, kind).reshape(50, columns))


@pytest.mark.parametrize(
    ("kind", "shape"), [("F16", (16, 32)), ("F32", (8, 32)), ("Q4_0", (32,)), ("Q8_0", (32,)), ("Q4_1", (1, 1, 32))]
)
def test_other_formats_and_other_ranks_have_no_groups(kind: str, shape: tuple[int, ...]) -> None:
    raw = bytes(4 * 8 * 32) if kind.startswith("F") else random_blocks(kind, 1, 0)
    assert read_groups(raw, kind, shape) is None


@pytest.mark.parametrize("has_floors", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_smaller_groups_with_or_without_floors_are_the_same_weights(kind: str, has_floors: bool) -> None:
    block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    groups = read_groups(random_blocks(kind, 20 * 512 // block_size, seed=4), kind, (20, 512))
    assert groups is not None
    small = groups.small(has_floors)
    assert small.size == 16
    assert (small.m is None) == (kind in FLOORLESS and not has_floors)
    np.testing.assert_allclose(small.floats(), groups.floats(), rtol=0, atol=2**-16 * np.abs(groups.d).max())


def test_groups_with_infinite_steps_are_passed_on_without_a_warning() -> None:
    raw = bytearray(random_blocks("Q4_K", 1, 0))
    raw[0:4] = np.array([np.inf, np.nan], "<f2").tobytes()
    groups = read_groups(bytes(raw), "Q4_K", (1, 256))
    assert groups is not None
    np.testing.assert_array_equal(groups.floats(), dequantize(bytes(raw), "Q4_K").reshape(1, 256))


def quantized_model(path: Path, kinds: dict[str, str]) -> Path:
    """A llama of width 256 whose matrices named in `kinds` are quantized blocks."""
    metadata, tensors = tiny_model("llama", layers=1, head_dim=64)
    metadata |= {"llama.embedding_length": 256, "llama.feed_forward_length": 256}
    wide = {
        name: np.ones([256 if size in (16, 24) else size for size in t.shape], np.float32)
        for name, t in tensors.items()
    }
    wide |= {
        f"blk.0.attn_{name}.weight": np.ones((rows, 256), np.float32)
        for name, rows in (("q", 256), ("k", 128), ("v", 128))
    }
    made = draft(metadata, {name: t for name, t in wide.items() if name not in kinds})
    for seed, (name, kind) in enumerate(kinds.items()):
        block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        raw = random_blocks(kind, wide[name].size // block_size, seed)
        made.entries.append(Entry(name, tuple(reversed(wide[name].shape)), KINDS[kind], len(made.payload)))
        made.payload += raw + bytes(-len(raw) % made.alignment)
    path.write_bytes(made.build())
    return path


def test_a_file_gives_groups_where_it_has_them_in_the_order_of_checkpoints(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_q.weight": "Q4_1", "blk.0.attn_k.weight": "Q4_0", "blk.0.ffn_up.weight": "Q4_K",
             "blk.0.ffn_gate.weight": "Q6_K"}  # fmt: skip
    with GGUFFile.open(quantized_model(tmp_path / "m.gguf", kinds)) as file:
        plain, grouped = dict(iter_tensors(file)), dict(iter_grouped(file))
    assert plain.keys() == grouped.keys()
    names = {name for name, tensor in grouped.items() if isinstance(tensor, Groups)}
    assert names == {
        "model.layers.0.self_attn.q_proj.weight",  # its rows and its groups' are put in order alike
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    }
    for name, tensor in grouped.items():
        np.testing.assert_array_equal(tensor.floats() if isinstance(tensor, Groups) else tensor, plain[name])
