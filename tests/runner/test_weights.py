"""A checkpoint becomes one mapped file in the layout of the kernels; anything that does not fit is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.errors import ModelFormatError
from headway.kernels import ref
from headway.kernels.ops import KernelSet
from headway.modelfile.cache import ModelCache
from headway.models.registry import parameters
from headway.runner.weights import load_weights, pack_weights, write_packed
from tiny_models import kernel_sets, random_tensors, tiny_spec

SPEC = tiny_spec()
SETS = {kernels.name: kernels for kernels in kernel_sets()}


@dataclass
class Checkpoint:
    """A source that counts how often it is read."""

    arrays: dict[str, np.ndarray]
    digest: str = "d" * 64
    reads: int = field(default=0)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        self.reads += 1
        for name, array in self.arrays.items():
            view = array.view()
            view.flags.writeable = False  # as mapped files hand them out
            yield name, view


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
def test_loaded_weights_are_what_was_packed(kernels: KernelSet, tmp_path: Path) -> None:
    spec = tiny_spec(family="qwen2", qkv_bias=True, tie_embeddings=False)
    arrays = random_tensors(spec)
    weights = load_weights(Checkpoint(arrays), spec, ModelCache(tmp_path), kernels)
    assert weights.layout == kernels.layout
    for param in parameters(spec):
        fused = torch.from_numpy(np.concatenate([arrays[part.source] for part in param.parts]))
        wanted = kernels.pack(fused) if param.is_matrix else fused
        assert torch.equal(weights[param.name], wanted)
    assert weights.num_bytes == sum(array.nbytes for array in arrays.values())


def test_second_start_maps_the_file_and_reads_no_checkpoint(tmp_path: Path) -> None:
    source, cache = Checkpoint(random_tensors(SPEC)), ModelCache(tmp_path)
    load_weights(source, SPEC, cache, ref.load())
    weights = load_weights(source, SPEC, cache, ref.load())
    assert source.reads == 1
    [file] = tmp_path.glob("*/weights-*.safetensors")
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if file.name in line
    ]
    for tensor in weights.tensors.values():
        assert tensor.data_ptr() % 64 == 0
        assert any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in spans)


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
    assert torch.isfinite(weights["embed"]).all()
    assert file.read_bytes() == data


def test_missing_tensors_are_named_and_leave_no_cache_entry(tmp_path: Path) -> None:
    arrays = random_tensors(SPEC)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFormatError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_weights(Checkpoint(arrays), SPEC, ModelCache(tmp_path), ref.load())
    assert not list(tmp_path.glob("*/weights-*"))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "extra", "model.layers.0.self_attn.q_proj.bias"])
def test_tensor_without_a_place_is_named(name: str) -> None:
    arrays = {**random_tensors(SPEC), name: np.zeros(3, np.float32)}
    with pytest.raises(ModelFormatError, match=name):
        list(pack_weights(arrays.items(), SPEC, ref.load()))


@pytest.mark.parametrize("shape", [(60, 61), (61, 60), (3600,), (1, 60, 60), ()])
def test_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    arrays = {**random_tensors(SPEC), "model.layers.0.self_attn.q_proj.weight": np.zeros(shape, np.float32)}
    with pytest.raises(ModelFormatError, match=r"layers\.0\.self_attn\.q_proj\.weight.*\[60, 60\]"):
        list(pack_weights(arrays.items(), SPEC, ref.load()))


def test_tensor_given_twice_is_refused() -> None:
    arrays = random_tensors(SPEC)
    twice = [*arrays.items(), ("model.norm.weight", arrays["model.norm.weight"])]
    with pytest.raises(ModelFormatError, match="twice"):
        list(pack_weights(twice, SPEC, ref.load()))


def test_copies_that_nobody_needs_are_passed_over() -> None:
    arrays = random_tensors(SPEC)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(5, np.float32)
    assert len(list(pack_weights(arrays.items(), SPEC, ref.load()))) == len(parameters(SPEC))


def test_parts_may_come_in_any_order(tmp_path: Path) -> None:
    arrays = random_tensors(SPEC)
    backwards = dict(reversed(arrays.items()))
    one, other = (dict(pack_weights(each.items(), SPEC, ref.load())) for each in (arrays, backwards))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_written_file_opens_with_safetensors_and_is_aligned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"a": torch.randn(3, 5), "b": torch.randn(16), "c": torch.randn(1)}
    write_packed(tmp_path / "x.safetensors", tensors.items(), 3)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
