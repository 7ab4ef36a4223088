"""Rows with adapters: the product of matrices that PEFT would add, and bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headway.errors import EngineError
from headway.kernels import native, ref
from headway.kernels.library import LEVELS, cpu_level
from headway.kernels.low_rank import NUMBERS, LowRank, pack_low_rank, unpack_low_rank
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS
from headway.models.adapter import MODULES, Adapter, AdapterRows, module_shapes
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec
from headway.runner.weights import pack_weights
from tiny_models import Driver, random_tensors, tiny_spec

BEST = LEVELS.index(cpu_level()) if cpu_level() in LEVELS else -1
HERE = LEVELS[: BEST + 1]
"""The levels of this machine."""
SHAPES = [(60, 77, 3), (576, 576, 16), (16, 400, 8), (33, 5, 256), (130, 16, 1), (1536, 64, 40)]  # in, out, rank


def matrices(num_in: int, num_out: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rank, num_in), np.float32) / np.float32(np.sqrt(num_in))
    return a, rng.standard_normal((num_out, rank), np.float32) / np.float32(np.sqrt(rank))


def random_adapter(spec: ModelSpec, seed: int, *, rank: int = 4, numbers: str = "float32") -> Adapter:
    """On every module but one of each layer."""
    layers: list[dict[str, LowRank]] = []
    for layer in range(spec.layers):
        shapes = module_shapes(spec)
        del shapes[MODULES[(seed + layer) % len(MODULES)]]
        pairs = {
            name: matrices(shape.num_in, shape.num_out, rank + at, seed * 100 + layer * 10 + at)
            for at, (name, shape) in enumerate(shapes.items())
        }
        layers.append({name: pack_low_rank(a, b, 0.7, numbers) for name, (a, b) in pairs.items()})
    return Adapter(layers)


def sets_here() -> list[KernelSet]:
    found = [native.load(threads, level) for level in HERE for threads in (1, 2)]
    return [ref.load(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_set_adds_the_product(shape: tuple[int, int, int], numbers: str) -> None:
    num_in, num_out, _ = shape
    a, b = matrices(*shape)
    w = pack_low_rank(a, b, 0.5, numbers)
    rng = np.random.default_rng(1)
    x, before = rng.standard_normal((9, num_in), np.float32), rng.standard_normal((9, num_out), np.float32)
    exact_a, exact_b = (np.asarray(each, np.float64) for each in unpack_low_rank(w))
    exact = before + x.astype(np.float64) @ exact_a.T * w.scales @ exact_b.T
    for kernels in sets_here():
        assert kernels.adapt is not None
        y = before.copy()
        kernels.adapt(x, w, y)
        assert np.abs(y - exact).max() < 2e-5, kernels.name
        bound = {"float32": 2e-5, "fp16": 5e-3, "int8": 0.1}[numbers]
        assert np.abs(y - (before + 0.5 * (x @ a.T) @ b.T)).max() < bound, kernels.name


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_gets_the_same_bits_alone_and_among_others(shape: tuple[int, int, int], numbers: str) -> None:
    num_in, num_out, _ = shape
    w = pack_low_rank(*matrices(*shape), 0.5, numbers)
    rng = np.random.default_rng(1)
    x, before = rng.standard_normal((40, num_in), np.float32), rng.standard_normal((40, num_out), np.float32)
    by_level: dict[str, np.ndarray] = {}
    for kernels in sets_here():
        assert kernels.adapt is not None
        all_rows = before.copy()
        kernels.adapt(x, w, all_rows)
        for first, last in ((0, 1), (7, 8), (3, 20), (39, 40)):
            y = before[first:last].copy()
            kernels.adapt(x[first:last], w, y)
            assert np.array_equal(y, all_rows[first:last]), kernels.name
        wide = np.tile(before, (1, 2))  # y may be some columns of wider rows
        kernels.adapt(x, w, wide[:, :num_out])
        assert np.array_equal(wide, np.hstack([all_rows, before])) or kernels.name == "ref"
        if kernels.name not in ("ref", "native-generic"):
            by_level.setdefault("fused", all_rows)
            assert np.array_equal(by_level["fused"], all_rows), kernels.name


def test_what_does_not_fit_halves_stays_float() -> None:
    a, b = matrices(20, 20, 4)
    assert pack_low_rank(a, b, 1.0, "fp16").shrink.dtype == np.float16
    assert pack_low_rank(a * np.float32(1e6), b, 1.0, "fp16").shrink.dtype == np.float32


def with_adapters(batch: ForwardBatch, adapters: Sequence[Adapter | None]) -> ForwardBatch:
    """Row r of the batch has adapters[r]."""
    table = tuple({id(each): each for each in adapters if each is not None}.values())
    of = [-1 if each is None else table.index(each) for each in adapters]
    rows = AdapterRows(np.array(of, np.int32)[batch.row_of], table)
    return replace(batch, adapters=rows)


def logits_of(
    decoder: Decoder | NativeDecoder,
    prompts: Sequence[list[int]],
    adapters: Sequence[Adapter | None],
    counts: Sequence[Sequence[int]],
) -> list[list[np.ndarray]]:
    """Each row's logits at all its tokens, computed in steps of so many tokens of each row."""
    driver = Driver(decoder)  # type: ignore[arg-type]
    rows = [driver.add(prompt) for prompt in prompts]
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for step in counts:
        work = [(at, row, count) for at, (row, count) in enumerate(zip(rows, step, strict=True)) if count]
        batch = driver.batch([(row, count) for _, row, count in work])
        of = [adapters[at] for at, _, _ in work]
        logits = decoder.forward(with_adapters(batch, of) if any(of) else batch, driver.kv)
        start = 0
        for at, row, count in work:
            found[at] += list(logits[start : start + count])
            row.done += count
            start += count
    return found


SPECS = {
    "llama": tiny_spec(),
    "gated at once": tiny_spec(intermediate=96, layers=3),
    "behind": tiny_spec(family="olmo2", qk_norm=True, qk_norm_is_wide=True, norms="behind", tie_embeddings=False),
    "around": tiny_spec(family="gemma2", norms="around", norm_offset=1.0, activation="gelu_tanh", qkv_bias=True),
}


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("dtype", PACKINGS)
@pytest.mark.parametrize("name", SPECS)
def test_rows_alone_and_together_on_both_decoders(name: str, dtype: str, level: str) -> None:
    spec = SPECS[name]
    prompts = [[(7 * i + 13 * r) % spec.vocab_size for i in range(n)] for r, n in enumerate((150, 9, 31, 20))]
    one, two = (
        random_adapter(spec, seed, numbers=dict(float32="float32", bfloat16="fp16").get(dtype, "int8"))
        for seed in (1, 2)
    )
    adapters = [one, None, two, one]
    steps = [[140, 0, 0, 0], [9, 8, 20, 0], [1, 1, 10, 19], [0, 0, 1, 1]]
    every = []
    for threads in (1, 2):
        kernels = native.load(threads, level, dtype=dtype)
        assert kernels is not None
        weights = ModelWeights(dict(pack_weights(random_tensors(spec).items(), spec, kernels)), kernels.layout)
        assert kernels.native is not None
        for decoder in (Decoder(spec, weights, kernels), NativeDecoder(spec, weights, kernels.native)):
            together = logits_of(decoder, prompts, adapters, steps)
            every.append(together)
            for at, prompt in enumerate(prompts):
                alone = logits_of(decoder, [prompt], [adapters[at]], [[len(prompt)]])
                assert np.array_equal(alone[0], together[at]), (type(decoder).__name__, at)
            plain = logits_of(decoder, [prompts[0]], [None], [[len(prompts[0])]])
            assert not np.array_equal(plain[0], together[0])
    for other in every[1:]:
        for ours, theirs in zip(every[0], other, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2] if HERE else [])
def test_sampled_rows_keep_their_own_adapter_in_the_last_layer(threads: int) -> None:
    spec = tiny_spec()
    kernels = native.load(threads)
    assert kernels is not None
    assert kernels.native is not None
    weights = ModelWeights(dict(pack_weights(random_tensors(spec).items(), spec, kernels)), kernels.layout)
    decoder = NativeDecoder(spec, weights, kernels.native)
    driver = Driver(decoder)  # type: ignore[arg-type]
    rows = [driver.add(list(range(n))) for n in (5, 3, 8)]
    batch = driver.batch([(row, len(row.tokens)) for row in rows])
    batch = with_adapters(batch, [random_adapter(spec, 1), None, random_adapter(spec, 2)])
    every = decoder.forward(batch, driver.kv)
    some = [15, 7, 0, 15]
    cut = decoder.forward(replace(batch, sample_index=np.array(some, np.int64)), driver.kv)
    assert np.array_equal(cut, every[some])
    assert np.array_equal(
        decoder.pick(replace(batch, sample_index=np.array(some, np.int64)), driver.kv), every[some].argmax(1)
    )


def test_an_index_that_names_no_adapter_is_refused() -> None:
    spec, kernels = tiny_spec(), native.load(1)
    if kernels is None or kernels.native is None:
        return
    weights = ModelWeights(dict(pack_weights(random_tensors(spec).items(), spec, kernels)), kernels.layout)
    decoder = NativeDecoder(spec, weights, kernels.native)
    driver = Driver(decoder)  # type: ignore[arg-type]
    batch = driver.batch([(driver.add([1, 2]), 2)])
    for of in (-2, 1):
        wrong = AdapterRows(np.full(2, of, np.int32), (random_adapter(spec, 1),))
        with pytest.raises(EngineError, match="the adapter of a token is none of those"):
            decoder.forward(replace(batch, adapters=wrong), driver.kv)
