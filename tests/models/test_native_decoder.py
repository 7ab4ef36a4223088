"""The native decoder against the one of single operations over the same kernels: equal bits, whatever the batch.

Without the library there is nothing native to compare, and choosing must fall back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch

from headway.errors import ConfigError, EngineError
from headway.kernels import native, ref
from headway.kernels.checks import Array
from headway.kernels.kv_format import kv_format
from headway.kernels.library import LEVELS, Context, cpu_level
from headway.kernels.ops import KernelSet
from headway.kernels.pack import Q8, Q8_FLOORS, format_of
from headway.kernels.packings import PACKINGS
from headway.modelfile.groups import Groups
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder, fit_kernels, make_decoder
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec, RopeScaling
from headway.runner.weights import pack_weights
from tiny_models import Driver, Row, random_tensors, tiny_spec

FAMILIES: dict[str, ModelSpec] = {
    "llama": tiny_spec(),
    "llama 3 rope, own head": tiny_spec(
        tie_embeddings=False, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), rope_theta=500000.0
    ),
    "mistral": tiny_spec(
        family="mistral", head_dim=16, heads=4, kv_heads=4, hidden=96, intermediate=160, vocab_size=97
    ),
    "qwen2": tiny_spec(family="qwen2", qkv_bias=True, heads=4, kv_heads=1, layers=1),
    "qwen3": tiny_spec(family="qwen3", qk_norm=True, head_dim=32, tie_embeddings=False, layers=3),
    "gemma2": tiny_spec(
        family="gemma2",
        norms="around",
        norm_offset=1.0,
        activation="gelu_tanh",
        embed_scale=7.7,
        logit_cap=3.0,
        attn_cap=2.0,
        attn_scale=0.2,
        windows=(33, 0),
    ),
    "gemma3": tiny_spec(
        family="gemma3",
        norms="around",
        activation="gelu_tanh",
        qk_norm=True,
        layers=3,
        windows=(20, 7, 0),
        window_rope_theta=100.0,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "granite": tiny_spec(family="granite", embed_scale=3.0, residual_scale=0.7, attn_scale=0.1, logit_scale=0.25),
    "olmo2": tiny_spec(family="olmo2", qk_norm=True, qk_norm_is_wide=True, norms="behind", tie_embeddings=False),
    "phi3": tiny_spec(
        family="phi3",
        rotary_dim=4,
        windows=(64, 64),
        rope_scaling=RopeScaling("divided", 4.0, divisors=(1.0, 3.0), amplitude=1.2),
    ),
}
BEST = LEVELS.index(cpu_level()) if cpu_level() in LEVELS else -1
HERE = LEVELS[: BEST + 1]
"""The levels of this machine."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(threads: int, level: str = "auto", dtype: str = "float32") -> KernelSet:
    kernels = native.load(threads, level, dtype=dtype)
    assert kernels is not None
    return kernels


def weights_of(spec: ModelSpec, tensors: dict[str, np.ndarray], kernels: KernelSet) -> ModelWeights[Array]:
    return ModelWeights(dict(pack_weights(tensors.items(), spec, kernels)), kernels.layout)


def weights_for(spec: ModelSpec, kernels: KernelSet) -> ModelWeights[Array]:
    return weights_of(spec, random_tensors(spec), kernels)


def both(spec: ModelSpec, kernels: KernelSet) -> tuple[Decoder, NativeDecoder]:
    weights = weights_for(spec, kernels)
    fast = make_decoder(spec, weights, kernels)
    assert isinstance(fast, NativeDecoder)
    return Decoder(spec, weights, kernels), fast


def mixed_steps(driver: Driver, vocab: int) -> Iterator[tuple[ForwardBatch, list[tuple[Row, int]]]]:
    """A long prompt in chunks, more rows joining, all of them decoding, one alone at the end."""
    rng = random.Random(4)
    rows = [driver.add([rng.randrange(vocab) for _ in range(count)]) for count in (150, 40, 9, 31)]
    for counts in [
        (100, 0, 0, 0),
        (30, 20, 0, 0),
        (1, 1, 5, 0),
        (1, 0, 0, 26),
        (1, 1, 1, 1),
        (2, 0, 0, 0),
        (1, 0, 0, 0),
    ]:
        work = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        yield driver.batch(work), work
        for row, count in work:
            row.done += count


def sampled(batch: ForwardBatch, indices: list[int]) -> ForwardBatch:
    return replace(batch, sample_index=np.array(indices, np.int64))


def small_step(
    decoder: Decoder | NativeDecoder, sizes: tuple[int, ...] = (20, 1, 3), num_blocks: int = 16
) -> tuple[ForwardBatch, Array]:
    """Rows from their first token on, and a KV pool of zeros."""
    driver = Driver(decoder, num_blocks=num_blocks)  # type: ignore[arg-type]
    rng = random.Random(2)
    rows = [driver.add([rng.randrange(decoder.spec.vocab_size) for _ in range(size)]) for size in sizes]
    return driver.batch([(row, len(row.tokens)) for row in rows]), np.zeros_like(driver.kv)


def run_both(slow: Decoder, fast: NativeDecoder, kv_dtype: str = "float32") -> list[Array]:
    """Logits and cells of a mix of steps, compared; every step's logits."""
    driver, other = Driver(slow), Driver(slow)
    if kv_dtype != "float32":
        for each in (driver, other):
            each.kv = empty_cells(slow.spec, kv_dtype)
    every = []
    for batch, _ in mixed_steps(driver, slow.spec.vocab_size):
        every.append(slow.forward(batch, driver.kv))
        assert np.array_equal(fast.forward(batch, other.kv), every[-1])
        assert np.array_equal(other.kv.view(np.uint8), driver.kv.view(np.uint8))
    return every


def empty_cells(spec: ModelSpec, kv_dtype: str) -> Array:
    """Every cell NaN, int8 by its scale."""
    kind = kv_format(kv_dtype)
    nan = np.full((spec.layers, 2, 200, 16, spec.kv_heads, kind.head_bytes(spec.head_dim)), 0xFF, np.uint8)
    return nan.view(kind.dtype)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cells_are_those_of_single_operations(family: str, level: str) -> None:
    for threads in (1, 2, 3):
        run_both(*both(FAMILIES[family], load(threads, level)))


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
@pytest.mark.parametrize("dtype", PACKINGS)
def test_every_format_gives_the_bits_of_single_operations(dtype: str, kv_dtype: str, level: str) -> None:
    for threads, family in ((1, "qwen3"), (2, "llama"), (3, "qwen2")):
        run_both(*both(FAMILIES[family], load(threads, level, dtype)), kv_dtype)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("has_floors", [False, True])
def test_groups_of_eight_bits_give_the_bits_of_single_operations(level: str, has_floors: bool) -> None:
    spec = tiny_spec(hidden=96, intermediate=240, head_dim=16, tie_embeddings=False)
    tensors = {
        name: array if array.ndim == 1 else eight_bits(array, has_floors)
        for name, array in random_tensors(spec).items()
    }
    for threads in (1, 2, 3):
        kernels = load(threads, level, "q4")
        weights = ModelWeights(dict(pack_weights(tensors.items(), spec, kernels)), kernels.layout)
        assert format_of(weights["layers.0.down"]) == (Q8_FLOORS if has_floors else Q8)
        fast = make_decoder(spec, weights, kernels)
        assert isinstance(fast, NativeDecoder)
        logits = run_both(Decoder(spec, weights, kernels), fast)
        exact, _ = both(spec, load(threads, level))
        driver = Driver(exact)
        for got, (batch, _) in zip(logits, mixed_steps(driver, spec.vocab_size), strict=True):
            wanted = exact.forward(batch, driver.kv)
            assert np.linalg.norm(got - wanted) < 0.1 * np.linalg.norm(wanted)


def eight_bits(array: Array, has_floors: bool) -> Groups:
    """Groups of 16 nearest to it."""
    groups = array.reshape(len(array), -1, 16)
    d = np.abs(groups).max(2) / np.float32(127)
    q = (np.rint(groups / d[:, :, None]) + 128).astype(np.uint8).reshape(array.shape)
    return Groups(q, d, np.float32(-128) * d if has_floors else None)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
@pytest.mark.parametrize("dtype", PACKINGS)
def test_levels_that_fuse_give_equal_bits(dtype: str, kv_dtype: str) -> None:
    runs = [run_both(*both(FAMILIES["qwen3"], load(2, level, dtype)), kv_dtype) for level in HERE[1:]]
    for first, second in itertools.pairwise(runs):
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("dtype", PACKINGS)
def test_many_rows_give_the_bits_of_single_operations(dtype: str, level: str) -> None:
    """Gate and up of 240 columns are five panels each: a group of four and one of one, times three blocks of rows."""
    for threads in (1, 2, 3):
        slow, fast = both(tiny_spec(intermediate=240), load(threads, level, dtype))
        batch, kv = small_step(slow, (130, 40, 1, 110), num_blocks=20)
        other = kv.copy()
        wanted = slow.forward(batch, kv)
        assert np.array_equal(fast.forward(batch, other), wanted)
        assert np.array_equal(other, kv)
        some = list(range(0, 281, 2))  # more than a block of rows in the last layer too
        assert np.array_equal(fast.forward(sampled(batch, some), other), wanted[some])
        assert np.array_equal(fast.forward(sampled(batch, [280]), other), wanted[[280]])


@pytest.mark.parametrize("indices", [[], [23], [19, 20, 23], [3, 3, 0, 21], [*range(24), 5]])
def test_any_choice_of_sampled_tokens_gives_their_own_logits(indices: list[int]) -> None:
    for threads, (name, spec) in itertools.product((1, 2) if HERE else (), FAMILIES.items()):
        slow, fast = both(spec, load(threads))
        batch, kv = small_step(slow)
        other = kv.copy()
        every = slow.forward(batch, kv)
        got = fast.forward(sampled(batch, indices), other)
        assert np.array_equal(got, every[np.array(indices, np.int64)]), name
        assert np.array_equal(other, kv), name


@pytest.mark.parametrize("threads", [1, 3] if HERE else [])
def test_pick_is_the_first_of_the_largest_logits(threads: int) -> None:
    spec = tiny_spec(vocab_size=1201, tie_embeddings=False)
    slow, fast = both(spec, load(threads))
    for sizes in ((1,), (1, 1), (20, 1, 3), (200, 1)):
        batch, kv = small_step(slow, sizes)
        wanted = slow.forward(batch, kv.copy()).argmax(-1)
        assert fast.pick(batch, kv.copy()).tolist() == wanted.tolist()
        some = list(range(0, len(wanted), 3))
        assert fast.pick(sampled(batch, some), kv.copy()).tolist() == wanted[some].tolist()


@pytest.mark.parametrize("threads", [1, 2, 3] if HERE else [])
def test_pick_takes_the_lowest_of_equal_ids_and_refuses_what_is_not_finite(threads: int) -> None:
    spec = tiny_spec(vocab_size=1201, tie_embeddings=False)
    kernels = load(threads)
    tensors = random_tensors(spec)
    head = tensors["lm_head.weight"]
    head[[5, 300, 777, 1199]] = 30 * head[300]
    first = pick_with(spec, tensors, kernels)
    ties = [i for i, token in enumerate(first) if token == 5]
    assert ties, "some row must have the four equal logits on top"
    head[[5, 300, 777]] *= -1  # now only the last of them
    assert [pick_with(spec, tensors, kernels)[i] for i in ties] == [1199] * len(ties)
    for broken in (40, 1200):  # inside and at the end of what is compared at once
        kept = head[broken].copy()
        for value in (np.nan, np.inf):  # infinity times inputs of both signs is not a number either
            head[broken] = value
            assert set(pick_with(spec, tensors, kernels)) == {-1}
        head[broken] = kept


@pytest.mark.parametrize("threads", [2, 3] if HERE else [])
def test_pick_takes_the_lowest_of_ids_that_threads_found_apart(threads: int) -> None:
    spec = tiny_spec(vocab_size=20_000, tie_embeddings=False, layers=1)  # so much that every thread takes some
    tensors = random_tensors(spec)
    tensors["lm_head.weight"][:] = tensors["lm_head.weight"][7]
    kernels = load(threads)
    assert {token for _ in range(3) for token in pick_with(spec, tensors, kernels, (120, 120))} == {0}


def pick_with(
    spec: ModelSpec, tensors: dict[str, np.ndarray], kernels: KernelSet, sizes: tuple[int, ...] = (20, 1, 3)
) -> list[int]:
    decoder = make_decoder(spec, weights_of(spec, tensors, kernels), kernels)
    assert isinstance(decoder, NativeDecoder)
    batch, kv = small_step(decoder, sizes)
    picked: list[int] = decoder.pick(batch, kv).tolist()
    return picked


@pytest.mark.parametrize(("value", "wanted"), [(np.inf, -1), (-np.inf, 0)])
def test_pick_with_infinite_logits(value: float, wanted: int) -> None:
    """One input feature that is never zero makes a whole row of the head infinite, with one sign."""
    spec = tiny_spec(vocab_size=100, tie_embeddings=False)
    tensors = random_tensors(spec)
    tensors["model.norm.weight"][1:] = 0
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][70, 0] = np.finfo(np.float32).max
    tensors["model.norm.weight"][0] = 1e30 if value > 0 else -1e30
    for threads in (1, 2) if HERE else ():
        kernels = load(threads)
        decoder = make_decoder(spec, weights_of(spec, tensors, kernels), kernels)
        assert isinstance(decoder, NativeDecoder)
        batch, kv = small_step(decoder)
        logits = decoder.forward(batch, kv)
        is_value = logits[:, 70] == value
        assert is_value.any()
        picked = decoder.pick(batch, kv)
        assert (picked[is_value] == wanted).all()


BAD: dict[str, tuple[str, int, str]] = {
    "token too large": ("tokens", 131, "token"),
    "token below zero": ("tokens", -1, "token"),
    "position past the table": ("positions", 64, "position"),
    "position below zero": ("positions", -1, "position"),
    "slot past the pool": ("slot_map", 16 * 16, "slot"),
    "slot below zero": ("slot_map", -1, "slot"),
    "row past the tables": ("row_of", 3, "table"),
    "row below zero": ("row_of", -1, "table"),
    "block past the pool": ("tables", 16, "block"),
    "block below zero": ("tables", -1, "block"),
    "sample past the tokens": ("sample_index", 24, "sampled"),
    "sample below zero": ("sample_index", -1, "sampled"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_index_out_of_range_is_an_error_and_no_cell_is_written(case: str) -> None:
    name, value, word = BAD[case]
    for threads in (1, 2) if HERE else ():
        _, fast = both(tiny_spec(), load(threads))
        batch, kv = small_step(fast)
        wrong = getattr(batch, name).copy()
        wrong.reshape(-1)[-1 if name != "tables" else 1] = value  # tables: the second block of the first row is in use
        for run in (fast.forward, fast.pick):
            with pytest.raises(EngineError, match=word):
                run(replace(batch, **{name: wrong}), kv)
        assert not kv.any()
        assert np.isfinite(fast.forward(batch, kv)).all()


def test_padding_of_a_table_is_never_looked_at() -> None:
    for threads in (1, 2) if HERE else ():
        slow, fast = both(tiny_spec(), load(threads))
        batch, kv = small_step(slow)
        padded = replace(batch, tables=np.concatenate([batch.tables, np.full((3, 2), 999, np.int32)], 1))
        assert np.array_equal(fast.forward(padded, kv.copy()), slow.forward(batch, kv))


@pytest.mark.parametrize("name", ["tokens", "positions", "slot_map", "row_of", "sample_index", "tables"])
def test_an_array_of_another_kind_is_an_error(name: str) -> None:
    if not HERE:
        return
    _, fast = both(tiny_spec(), load(1))
    batch, kv = small_step(fast)
    value = getattr(batch, name)
    for wrong in (value.astype(np.float32), value.repeat(2, -1)[..., ::2]):
        with pytest.raises(EngineError, match=name):
            fast.forward(replace(batch, **{name: wrong}), kv)
    with pytest.raises(EngineError, match="float64"):
        fast.forward(batch, kv.astype(np.float64))
    with pytest.raises(EngineError, match="kv"):
        fast.forward(batch, kv[:, :, :, :, :, :-2].copy())


def test_weights_of_another_shape_are_refused() -> None:
    if not HERE:
        return
    kernels = load(1)
    weights = weights_for(tiny_spec(), kernels)
    tensors = {**weights.tensors, "layers.1.down": weights["layers.1.down"][:-1].copy()}
    with pytest.raises(ConfigError, match="weights"):
        make_decoder(tiny_spec(), ModelWeights(tensors, weights.layout), kernels)


def test_kernels_without_a_native_decoder_get_the_one_of_single_operations() -> None:
    kernels = ref.load()
    assert isinstance(make_decoder(tiny_spec(), weights_for(tiny_spec(), kernels), kernels), Decoder)


@dataclass(frozen=True, slots=True)
class WindowedSpec(ModelSpec):
    """A model with something that a later family may bring."""

    window: int | None = None


@pytest.mark.parametrize(("window", "falls"), [(None, False), (64, True)])
def test_kernels_lose_a_native_decoder_that_does_not_know_the_model(window: int | None, falls: bool) -> None:
    spec = WindowedSpec(**asdict(tiny_spec()), window=window)
    kernels = replace(ref.load(), native=Context.__new__(Context), fallback="slow already")
    fitted = fit_kernels(kernels, spec)
    assert (fitted.native is None) == falls
    more = "; the native decoder does not know window = 64" if falls else ""
    assert fitted.fallback == "slow already" + more
    assert fit_kernels(fitted, spec) is fitted, "said once"
