"""A checkpoint becomes one mapped file in the layout of the kernels; anything that does not fit is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.errors import ModelFormatError
from headway.kernels import pack, pack_q4, pack_q8, ref
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS
from headway.modelfile.cache import ModelCache
from headway.modelfile.groups import Groups
from headway.modelfile.safetensors import SafetensorsFile
from headway.models.registry import parameters
from headway.runner.cuda import weights as cuda_weights
from headway.runner.packed import read_packed, write_packed
from headway.runner.weights import load_weights, pack_weights
from tiny_models import kernel_sets, random_tensors, tiny_spec

Tensors = Iterable[tuple[str, np.ndarray]]
Loader = Callable[[Tensors], Mapping[str, Tensor | np.ndarray]]

SPEC = tiny_spec()
SETS = {kernels.name: kernels for kernels in kernel_sets()}
WIDE = tiny_spec(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)  # rows of whole 4-bit groups


def packed_set(dtype: str) -> KernelSet:
    """A set that packs as a dtype's native one does, on every machine."""
    packing = PACKINGS[dtype]
    return replace(
        ref.load(),
        layout=packing.layout,
        pack=packing.pack,
        pack_table=packing.pack_table,
        pack_groups=packing.pack_groups,
        pack_bytes=packing.pack_bytes,
    )


def load_to_device(tensors: Tensors, **more: object) -> dict[str, Tensor]:
    """As a CUDA device is filled, but in the memory of the host."""
    options: dict = {"dtype": torch.float32, "device": torch.device("cpu"), **more}
    return dict(cuda_weights.load_weights(tensors, SPEC, **options).tensors)


def load_to_host(tensors: Tensors) -> dict[str, np.ndarray]:
    return dict(pack_weights(tensors, SPEC, ref.load()))


LOADERS = pytest.mark.parametrize("load", [load_to_host, load_to_device])
BLOBS = {dtype: packed_set(dtype) for dtype in PACKINGS if dtype != "float32"}


@dataclass
class Checkpoint:
    """A source that counts how often it is read."""

    arrays: dict[str, np.ndarray]
    digest: str = "d" * 64
    reads: int = field(default=0)
    has_groups: Sequence[str] = ()  # whose names end so
    has_bytes: Sequence[str] = ()  # groups of 8 bits

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        self.reads += 1
        for name, array in self.arrays.items():
            view = array.view()
            view.flags.writeable = False  # as mapped files hand them out
            yield name, view

    def grouped(self) -> Iterator[tuple[str, np.ndarray | Groups]]:
        for name, array in self.tensors():
            if name.endswith(tuple(self.has_bytes)):
                yield name, bytes_of(array)
            else:
                yield name, groups_of(array) if name.endswith(tuple(self.has_groups)) else array


def groups_of(array: np.ndarray) -> Groups:
    """Some groups of that shape, nothing near the array."""
    rng = np.random.default_rng(array.size)
    steps = [rng.normal(size=(len(array), array.shape[1] // 32)).astype(np.float16).astype(np.float32) for _ in "dm"]
    return Groups(rng.integers(0, 16, array.shape, np.uint8), *steps)


def bytes_of(array: np.ndarray) -> Groups:
    """The same of 8 bits, without floors."""
    rng = np.random.default_rng(array.size)
    steps = rng.normal(size=(len(array), array.shape[1] // 16)).astype(np.float32)
    return Groups(rng.integers(0, 256, array.shape, np.uint8), steps, None)


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
def test_loaded_weights_are_what_was_packed(kernels: KernelSet, tmp_path: Path) -> None:
    spec = tiny_spec(family="qwen2", qkv_bias=True, tie_embeddings=False)
    arrays = random_tensors(spec)
    weights = load_weights(Checkpoint(arrays), spec, ModelCache(tmp_path), kernels)
    assert weights.layout == kernels.layout
    for param in parameters(spec):
        fused = np.concatenate([arrays[part.source] for part in param.parts])
        wanted = kernels.pack(fused) if param.is_matrix else fused
        assert np.array_equal(weights[param.name], wanted)
    assert weights.num_bytes == sum(array.nbytes for array in arrays.values())


def test_second_start_reads_the_file_into_one_piece_of_memory_and_no_checkpoint(tmp_path: Path) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    load_weights(source, SPEC, cache, ref.load())
    weights = load_weights(source, SPEC, cache, ref.load())
    assert source.reads == 1
    [file] = tmp_path.glob("*/weights-*.safetensors")
    addresses = [tensor.ctypes.data for tensor in weights.tensors.values()]
    assert all(address % 64 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < file.stat().st_size


def test_another_layout_gets_a_file_of_its_own(tmp_path: Path) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    for kernels in kernel_sets():
        load_weights(source, SPEC, cache, kernels)
    assert len(list(tmp_path.glob("*/weights-*"))) == len(kernel_sets())


@pytest.mark.parametrize("damage", [lambda data: data[:-64], lambda data: b"\xff" * 16 + data[16:], lambda data: b""])
def test_damaged_cache_file_is_made_anew(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    load_weights(source, SPEC, cache, ref.load())
    [file] = tmp_path.glob("*/weights-*")
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(damage(data))
    weights = load_weights(source, SPEC, cache, ref.load())
    assert source.reads == 2
    assert np.isfinite(weights["embed"]).all()
    assert file.read_bytes() == data


def test_missing_tensors_are_named_and_leave_no_cache_entry(tmp_path: Path) -> None:
    arrays = random_tensors(SPEC)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFormatError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_weights(Checkpoint(arrays), SPEC, ModelCache(tmp_path), ref.load())
    assert not list(tmp_path.glob("*/weights-*"))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "extra", "model.layers.0.self_attn.q_proj.bias"])
@LOADERS
def test_tensor_without_a_place_is_named(name: str, load: Loader) -> None:
    arrays = {**random_tensors(SPEC), name: np.zeros(3, np.float32)}
    with pytest.raises(ModelFormatError, match=name):
        load(arrays.items())


@pytest.mark.parametrize("shape", [(60, 61), (61, 60), (3600,), (1, 60, 60), ()])
@LOADERS
def test_wrong_shape_is_named(shape: tuple[int, ...], load: Loader) -> None:
    arrays = {**random_tensors(SPEC), "model.layers.0.self_attn.q_proj.weight": np.zeros(shape, np.float32)}
    with pytest.raises(ModelFormatError, match=r"layers\.0\.self_attn\.q_proj\.weight.*\[60, 60\]"):
        load(arrays.items())


@LOADERS
def test_tensor_given_twice_is_refused(load: Loader) -> None:
    arrays = random_tensors(SPEC)
    twice = [*arrays.items(), ("model.norm.weight", arrays["model.norm.weight"])]
    with pytest.raises(ModelFormatError, match="twice"):
        load(twice)


@LOADERS
def test_unused_copies_are_skipped(load: Loader) -> None:
    arrays = random_tensors(SPEC)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(5, np.float32)
    assert len(load(arrays.items())) == len(parameters(SPEC))


def test_a_device_gets_the_parts_as_rows_of_their_parameter_and_says_how_far_it_is() -> None:
    arrays, progress = random_tensors(SPEC), list[tuple[int, int]]()
    with pytest.raises(ModelFormatError, match=r"lacks 1 .*model\.norm"):
        load_to_device(item for item in arrays.items() if item[0] != "model.norm.weight")
    found = load_to_device(arrays.items(), on_progress=lambda done, total: progress.append((done, total)))
    for param in parameters(SPEC):
        assert np.array_equal(found[param.name], np.concatenate([arrays[part.source] for part in param.parts]))
    sizes = [array.size for array in arrays.values()]
    assert progress == [(done, sum(sizes)) for done in accumulate(sizes)]


@LOADERS
def test_parts_may_come_in_any_order(load: Loader) -> None:
    arrays = random_tensors(SPEC)
    backwards = dict(reversed(arrays.items()))
    one, other = load(arrays.items()), load(backwards.items())
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_written_file_opens_with_safetensors_and_is_aligned(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = {"a": np.ones((3, 5), np.float32), "b": np.zeros(16, np.float32), "c": np.full(1, 7, np.float32)}
    write_packed(tmp_path / "x.safetensors", tensors.items(), 3)
    for loaded in (load_file(tmp_path / "x.safetensors"), read_packed(tmp_path / "x.safetensors")):
        assert loaded.keys() >= tensors.keys()
        assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"F64"'),
        (b"[3,5]", b"[3,6]"),
        (b"[0,60]", b"[0,64]"),
        (b"[0,60]", b"[4,60]"),
        (b"[0,60]", b"[0,-6]"),
        (b'"a":', b'"a"='),
        (b'"shape"', b'"shade"'),
    ],
)
def test_a_header_that_lies_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_packed(file, {"a": np.ones((3, 5), np.float32), "b": np.zeros(16, np.float32)}.items(), 2)
    data = file.read_bytes()
    assert data.count(old) >= 1
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelFormatError):
        read_packed(file)


@pytest.mark.parametrize("kernels", BLOBS.values(), ids=BLOBS)
def test_blobs_are_stored_as_they_were_packed(kernels: KernelSet, tmp_path: Path) -> None:
    spec = tiny_spec(family="qwen2", qkv_bias=True, tie_embeddings=False)
    arrays, cache = random_tensors(spec), ModelCache(tmp_path)
    for _ in range(2):
        weights = load_weights(Checkpoint(arrays), spec, cache, kernels)
        for param in parameters(spec):
            fused = np.concatenate([arrays[part.source] for part in param.parts])
            packer = kernels.pack_table if param.is_table and kernels.pack_table else kernels.pack
            wanted = packer(fused) if param.is_matrix else fused
            assert weights[param.name].dtype == (np.uint8 if param.is_matrix else np.float32)
            assert weights[param.name].ctypes.data % 64 == 0
            assert np.array_equal(weights[param.name], wanted)


def test_dtypes_keep_their_files_side_by_side(tmp_path: Path) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    for _ in range(2):
        for kernels in BLOBS.values():
            assert load_weights(source, SPEC, cache, kernels).layout == kernels.layout
    assert source.reads == len(BLOBS) == len(list(tmp_path.glob("*/weights-*")))


@pytest.mark.parametrize("kernels", BLOBS.values(), ids=BLOBS)
@pytest.mark.parametrize("field_of_header", [0, 1, 2, 3])
def test_blob_that_says_it_is_another_matrix_is_made_anew(
    kernels: KernelSet, field_of_header: int, tmp_path: Path
) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    load_weights(source, SPEC, cache, kernels)
    [file] = tmp_path.glob("*/weights-*")
    data = bytearray(file.read_bytes())
    data[data.rindex(b"HWMATRX1") + 8 * field_of_header] ^= 64
    file.unlink()
    file.write_bytes(data)
    load_weights(source, SPEC, cache, kernels)
    assert source.reads == 2
    assert file.read_bytes() != data


def test_four_bit_groups_of_the_file_are_taken_as_they_are(tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    source = Checkpoint(arrays, has_groups=("q_proj.weight", "k_proj.weight", "v_proj.weight", "down_proj.weight"))
    weights = load_weights(source, WIDE, ModelCache(tmp_path), BLOBS["q4"])
    names = [f"model.layers.1.self_attn.{side}_proj.weight" for side in "qkv"]
    q, d, m = pack_q4.unpack(weights["layers.1.qkv"])
    parts = [groups_of(arrays[name]) for name in names]
    np.testing.assert_array_equal(q, np.concatenate([part.q for part in parts]))
    np.testing.assert_array_equal(d, np.concatenate([part.d for part in parts]))
    np.testing.assert_array_equal(m, np.concatenate([part.m for part in parts]))


def test_groups_of_more_than_four_bits_are_not_rounded(tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    source = Checkpoint(
        arrays, has_groups=("q_proj.weight", "k_proj.weight"), has_bytes=("v_proj.weight", "down_proj.weight")
    )
    weights = load_weights(source, WIDE, ModelCache(tmp_path), BLOBS["q4"])
    down = bytes_of(arrays["model.layers.1.mlp.down_proj.weight"])
    assert np.array_equal(weights["layers.1.down"], pack_q8.pack_bytes(down.q, down.d, None))
    q, d, m = pack_q8.unpack(weights["layers.1.qkv"])  # of which two parts have floors
    assert m is not None
    names = [f"model.layers.1.self_attn.{side}_proj.weight" for side in "qkv"]
    wanted = [*(groups_of(arrays[name]).floats() for name in names[:2]), bytes_of(arrays[names[2]]).floats()]
    got = q * d.repeat(16, 1) + m.repeat(16, 1)
    np.testing.assert_allclose(got, np.concatenate(wanted), atol=1e-4)


def test_without_kernels_for_them_such_groups_are_floats(tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    source = Checkpoint(arrays, has_groups=("down_proj.weight",), has_bytes=("v_proj.weight", "o_proj.weight"))
    weights = load_weights(source, WIDE, ModelCache(tmp_path), packed_set("float32"))
    assert weights["layers.1.down"].dtype == np.uint8
    o = bytes_of(arrays["model.layers.1.self_attn.o_proj.weight"]).floats()
    assert np.array_equal(weights["layers.1.o"], pack.pack_f32(o))
    assert weights["layers.1.qkv"].dtype == np.float32


def test_float32_keeps_the_groups_of_the_file_where_all_parts_have_them(tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    source = Checkpoint(arrays, has_groups=("q_proj.weight", "down_proj.weight", "embed_tokens.weight"))
    weights = load_weights(source, WIDE, ModelCache(tmp_path), packed_set("float32"))
    groups = groups_of(arrays["model.layers.1.mlp.down_proj.weight"])
    assert np.array_equal(weights["layers.1.down"], pack_q4.pack_exactly(groups.q, groups.d, groups.m))
    assert weights["layers.1.down"].dtype == np.uint8
    assert weights["layers.1.qkv"].dtype == weights["layers.1.o"].dtype == weights["embed"].dtype == np.float32


@pytest.mark.parametrize("has_groups", [("q_proj.weight", "k_proj.weight"), ("v_proj.weight",)])
def test_groups_of_some_parts_alone_are_rounded_with_the_rest(has_groups: tuple[str, ...], tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    weights = load_weights(Checkpoint(arrays, has_groups=has_groups), WIDE, ModelCache(tmp_path), BLOBS["q4"])
    names = [f"model.layers.0.self_attn.{side}_proj.weight" for side in "qkv"]
    fused = [groups_of(arrays[name]).floats() if name.endswith(has_groups) else arrays[name] for name in names]
    assert np.array_equal(weights["layers.0.qkv"], pack_q4.pack(np.concatenate(fused)))


def test_tables_stay_finer_than_four_bits_even_where_the_file_has_groups(tmp_path: Path) -> None:
    arrays = random_tensors(WIDE)
    source = Checkpoint(arrays, has_groups=("embed_tokens.weight",))
    weights = load_weights(source, WIDE, ModelCache(tmp_path), BLOBS["q4"])
    floats = groups_of(arrays["model.embed_tokens.weight"]).floats()
    assert np.array_equal(weights["embed"], pack.pack_i8(floats))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_goes_to_a_device_in_the_format_it_is_stored_in(tmp_path: Path, kind: torch.dtype) -> None:
    stored = {name: torch.from_numpy(array).to(kind) for name, array in random_tensors(SPEC).items()}
    save_file(stored, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    raw = load_to_device(((name, file.raw(name)) for name in file.tensors), dtype=kind)  # type: ignore[misc]
    wanted = load_to_device((name, file.data(name)) for name in file.tensors)
    assert raw.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert raw[name].dtype == kind
        assert torch.equal(raw[name].float(), tensor)
