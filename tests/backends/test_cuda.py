"""What the CUDA backend decides without a device: formats, the KV pool, and how it says that there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headway.backends import cuda
from headway.build import load
from headway.config import CacheConfig, EngineConfig
from headway.errors import ConfigError
from tiny_models import tiny_spec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_asking_for_one_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but .*; allowed here: cpu"):
        load(EngineConfig.of(device="cuda"))


@pytest.mark.parametrize(
    ("dtype", "kv", "chosen"),
    [
        ("auto", "auto", ("bfloat16", "bfloat16")),
        ("float32", "float32", ("float32", "float32")),
        ("float16", "fp16", ("float16", "float16")),
        ("auto", "fp8", ("bfloat16", "fp8")),
        ("fp8", "auto", ("fp8", "bfloat16")),
        ("fp8", "fp8", ("fp8", "fp8")),
        ("auto", "int8", ("bfloat16", "int8")),
        ("fp8", "int8", ("fp8", "int8")),
    ],
)
def test_kv_has_the_activations_format_or_one_of_a_byte(dtype: str, kv: str, chosen: tuple[str, str]) -> None:
    assert cuda.resolve_dtypes(dtype, kv) == chosen


@pytest.mark.parametrize(("dtype", "kv"), [("q4", "auto"), ("int8", "int8"), ("bfloat16", "float32"), ("auto", "fp16")])
def test_formats_that_the_device_has_not_are_refused(dtype: str, kv: str) -> None:
    with pytest.raises(ConfigError, match="on a CUDA device allowed are auto"):
        cuda.resolve_dtypes(dtype, kv)


def test_windows_cut_the_context_and_other_variants_are_refused() -> None:
    usual = tiny_spec(qk_norm=True)
    assert cuda.known_spec(usual) == usual
    windowed = cuda.known_spec(tiny_spec(windows=(100, 0)))
    assert (windowed.windows, windowed.max_len) == ((), 100)
    with pytest.raises(ConfigError, match=r"gemma2, has norms = 'around', logit_cap = 30\.0, which"):
        cuda.known_spec(tiny_spec(family="gemma2", norms="around", logit_cap=30.0))


@pytest.mark.parametrize(
    ("change", "block_size", "formats", "words"),
    [
        ({}, 8, ("bfloat16", "bfloat16"), "block_size is 8; .*multiples of 16"),
        ({}, 24, ("float32", "float32"), "block_size is 24"),
        ({"heads": 65, "kv_heads": 1}, 16, ("float32", "float32"), "65 to a key head"),
        ({"head_dim": 8}, 16, ("float32", "float32"), "heads of 8"),
        ({"head_dim": 16}, 16, ("bfloat16", "int8"), "heads of 16"),
        ({"intermediate": 100}, 16, ("bfloat16", "bfloat16"), "intermediate size is 100; .*multiples of 8"),
        ({"hidden": 104}, 16, ("fp8", "fp8"), "hidden size is 104; .*multiples of 16"),
    ],
)
def test_sizes_that_the_kernels_cannot_compute_are_refused(
    change: dict[str, int], block_size: int, formats: tuple[str, str], words: str
) -> None:
    sizes = {"heads": 64, "kv_heads": 1, "head_dim": 32, "hidden": 96, "intermediate": 112}
    cuda.require_sizes(tiny_spec(**sizes), 32, *formats)
    with pytest.raises(ConfigError, match=words):
        cuda.require_sizes(tiny_spec(**{**sizes, **change}), block_size, *formats)


def test_the_pool_takes_most_of_the_free_memory_by_default() -> None:
    assert cuda.with_pool(CacheConfig(), 100 << 30).kv_memory_gb == pytest.approx(92)
    assert cuda.with_pool(CacheConfig(kv_memory_gb=3), 100 << 30).kv_memory_gb == 3
    assert cuda.with_pool(CacheConfig(num_blocks=7), 100 << 30).kv_memory_gb is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_machine_without_a_device_is_described_so() -> None:
    assert cuda.describe().startswith("not usable: ")


EIGHT_B = 16.06e9 / 4.81e12  # seconds in which an H200 reads the weights of llama-3.1-8b
ONE_B = 2.47e9 / 4.81e12


def test_a_device_has_defaults_of_its_own() -> None:
    chosen = cuda.with_defaults(EngineConfig(), EIGHT_B).scheduler
    assert (chosen.num_slots, chosen.num_tokens, chosen.num_plans) == (512, 4096, 2)
    chosen = cuda.with_defaults(EngineConfig.of(target_itl_ms=30), EIGHT_B).scheduler
    assert (chosen.num_slots, chosen.num_tokens, chosen.num_plans) == (256, 4096, 2)
    chosen = cuda.with_defaults(EngineConfig.of(max_num_seqs=5000, depth=1), EIGHT_B).scheduler
    assert (chosen.num_slots, chosen.num_tokens, chosen.num_plans) == (5000, 5000, 1)


def test_the_bandwidth_is_the_data_sheets_or_a_usual_one() -> None:
    h200 = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6016)
    assert cuda._bandwidth(h200) == pytest.approx(4.81e12, rel=1e-3)
    assert cuda._bandwidth(SimpleNamespace(memory_clock_rate=0, memory_bus_width=0)) == 1e12
    assert cuda._bandwidth(SimpleNamespace()) == 1e12


@pytest.mark.parametrize(
    ("target", "read_s", "slots"),
    [(None, EIGHT_B, 512), (14, EIGHT_B, 128), (28, EIGHT_B, 256), (200, EIGHT_B, 512), (14, ONE_B, 512), (1, 1.0, 32)],
)
def test_a_target_leaves_as_many_slots_as_it_has_time_for(target: float | None, read_s: float, slots: int) -> None:
    assert cuda.default_slots(target, read_s) == slots


def test_a_pool_for_which_nothing_is_left_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"takes 2\.00 GiB more .* than is free.* lower --kv-memory-gb"):
        cuda.with_pool(CacheConfig(), -(2 << 30))


OUT = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate 2 GiB"), RuntimeError(OUT)])
def test_memory_that_the_device_has_not_is_named_with_what_is_free(error: Exception) -> None:
    device: cuda.CudaDevice = SimpleNamespace(free_bytes=lambda: 3 << 30, total_bytes=8 << 30)  # type: ignore[assignment]
    words = r"the weights take about 5\.00 GiB .* of which 3\.00 of 8\.00 GiB were free: .*smaller model"
    with pytest.raises(ConfigError, match=words) as raised, cuda.within_memory(device, "the weights", 5 << 30):
        raise error
    assert raised.value.__cause__ is error
    with pytest.raises(RuntimeError, match="illegal"), cuda.within_memory(device, "the weights", 5 << 30):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_without_room_for_a_context_is_named_too() -> None:
    def full() -> int:
        raise RuntimeError(OUT)

    device: cuda.CudaDevice = SimpleNamespace(free_bytes=full, total_bytes=8 << 30)  # type: ignore[assignment]
    with (
        pytest.raises(ConfigError, match=r"0\.00 of 8\.00 GiB were free"),
        cuda.within_memory(device, "the weights", 1),
    ):
        pass
