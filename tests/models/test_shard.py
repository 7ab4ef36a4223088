"""A model that several processes compute has the bits of one that a single process computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.errors import ConfigError
from headway.kernels import native, ref, ref_quant
from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet
from headway.models.decoder import Decoder
from headway.models.params import ModelWeights
from headway.models.registry import parameters
from headway.models.shard import Gather, Shard, check_split, rows_of
from headway.models.spec import ModelSpec
from headway.runner.gather import GlooGather, ShardLost
from headway.runner.weights import pack_weights
from tiny_models import random_tensors, run_in_random_company, tiny_decoder, tiny_spec

PROMPTS = [[(7 * i + 3 * k) % 131 for i in range(length)] for k, length in enumerate((1, 5, 16, 17, 40, 90))]
WIDE = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab_size": 131}


class Meeting:
    """Gathers for threads of one process."""

    def __init__(self, size: int) -> None:
        self._pieces: list[Array] = [np.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def gather(self, rank: int) -> Gather:
        def run(x: Array, widths: Sequence[int]) -> Array:
            assert x.shape[1] == widths[rank]
            self._pieces[rank] = x
            self._barrier.wait()
            whole = np.concatenate(self._pieces, axis=1)
            self._barrier.wait()
            return whole

        return run


def part(spec: ModelSpec, kernels: KernelSet, shard: Shard, gather: Gather) -> Decoder:
    packed = dict(pack_weights(random_tensors(spec).items(), spec, kernels, shard))
    return Decoder(spec, ModelWeights(packed, kernels.layout), kernels, shard, gather)


def spread(spec: ModelSpec, make: Callable[[], KernelSet], size: int) -> list[list[torch.Tensor]]:
    """The logits of every prompt by each of `size` parts, in random chunks and company."""
    meeting = Meeting(size)

    def run(rank: int) -> list[torch.Tensor]:
        decoder = part(spec, make(), Shard(rank, size), meeting.gather(rank))
        return run_in_random_company(decoder, PROMPTS, 16, seed=size)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def native_set() -> KernelSet:
    found = native.load(1)
    if found is None:
        pytest.skip("the native kernels are not installed")
    return found


SETS: dict[str, Callable[[], KernelSet]] = {
    "ref": ref.load,
    "ref-bfloat16": lambda: ref_quant.load("bfloat16", 1),
    "ref-int8": lambda: ref_quant.load("int8", 1),
    "native": native_set,
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SETS)
def test_logits_of_parts_have_the_bits_of_the_whole(name: str, size: int) -> None:
    spec = tiny_spec(**WIDE)
    kernels = SETS[name]()
    whole = run_in_random_company(tiny_decoder(spec, kernels), PROMPTS, 16, seed=size)
    for found in spread(spec, SETS[name], size):
        for ours, theirs in zip(whole, found, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 9, "kv_heads": 3, "hidden": 61, "vocab_size": 133},
        {**WIDE, "tie_embeddings": False},
        {**WIDE, "qkv_bias": True, "family": "qwen2"},
        {**WIDE, "qk_norm": True, "family": "qwen3"},
    ],
    ids=["uneven", "head", "bias", "qk-norm"],
)
def test_every_kind_of_model_can_be_spread(changes: dict[str, object]) -> None:
    spec = tiny_spec(**changes)
    whole = run_in_random_company(tiny_decoder(spec, ref.load()), PROMPTS, 16, seed=2)
    for found in spread(spec, ref.load, 2):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole, found, strict=True))


def test_every_row_of_a_split_parameter_is_in_exactly_one_part() -> None:
    spec = tiny_spec(heads=9, kv_heads=3, tie_embeddings=False, qkv_bias=True, family="qwen2")
    for param in parameters(spec):
        parts = [rows_of(param, spec, Shard(rank, 2)) for rank in range(2)]
        if parts[0] is None:
            assert parts[1] is None
            continue
        assert parts[1] is not None
        assert sorted(np.concatenate([parts[0], parts[1]]).tolist()) == list(range(param.rows))


def test_more_processes_than_key_heads_are_refused() -> None:
    check_split(tiny_spec(kv_heads=2), 2)
    check_split(tiny_spec(experts=4, experts_per_token=2), 1)
    with pytest.raises(ConfigError, match="a model with experts runs in one process"):
        check_split(tiny_spec(experts=4, experts_per_token=2), 2)
    with pytest.raises(ConfigError, match="one norm over all heads runs in one process"):
        check_split(tiny_spec(qk_norm=True, qk_norm_is_wide=True), 2)
    with pytest.raises(ConfigError, match="tensor_parallel is 3; this model has 2 key heads, so allowed: 1 to 2"):
        check_split(tiny_spec(kv_heads=2), 3)


def meet(gather: GlooGather, path: Path) -> None:
    gather.meet(path, timeout_s=20)


def test_gloo_puts_pieces_of_unequal_width_together(tmp_path: Path) -> None:
    size, widths = 3, (2, 2, 1)
    gathers = [GlooGather(Shard(rank, size)) for rank in range(size)]
    pieces = [np.full((4, width), rank, np.float32) for rank, width in enumerate(widths)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda gather: meet(gather, tmp_path / "meeting"), gathers))
        found = list(pool.map(lambda rank: gathers[rank](pieces[rank], widths), range(size)))
    for each in found:
        assert each.tolist() == [[0, 0, 1, 1, 2]] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_parts_over_gloo_have_the_bits_of_the_whole(tmp_path: Path, size: int) -> None:
    spec = tiny_spec(**WIDE)
    whole = run_in_random_company(tiny_decoder(spec, ref.load()), PROMPTS, 16, seed=5)

    def run(rank: int) -> list[torch.Tensor]:
        gather = GlooGather(Shard(rank, size))
        meet(gather, tmp_path / "meeting")
        return run_in_random_company(part(spec, ref.load(), Shard(rank, size), gather), PROMPTS, 16, seed=5)

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(run, range(size)):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole, found, strict=True))


def test_a_part_that_never_comes_is_a_lost_one(tmp_path: Path) -> None:
    with pytest.raises(ShardLost, match="did not find each other"):
        GlooGather(Shard(0, 2)).meet(tmp_path / "meeting", timeout_s=0.5)
