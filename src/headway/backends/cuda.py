"""A CUDA device as a backend: what it is, how much memory it has, and executors over a model in that memory.

Importing this file needs neither a device nor Triton; `open_device` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from headway.backends._host import free_memory
from headway.backends._seam import Backend, ComputeInfo
from headway.config import CacheConfig, EngineConfig
from headway.engine.executor import Executor
from headway.errors import ConfigError
from headway.modelfile.reading import shown
from headway.modelfile.source import ModelSource, open_model
from headway.models.params import ModelWeights
from headway.models.registry import parameters, read_config
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec, beyond
from headway.runner.memory import count_blocks, count_host_blocks

DEFAULT_SLOTS = 512
SLOT_STEP = 32  # decode buckets lie so far apart; also the slots for each time that weights are read within a target
DEFAULT_STEP_TOKENS = 4096
DEFAULT_DEPTH = 2
_USUAL_BYTES_PER_S = 1e12
POOL_SHARE = 0.92  # of the device memory that weights and working memory leave: libraries take some later
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""Number formats of weights. With fp8, layers compute in e4m3 and everything else in bfloat16."""
KV_DTYPES = {**DTYPES, "int8": torch.uint8}
"""Those of KV: the activations', or one of a byte with a factor for each head; int8 is kept as number + 128."""
_BYTE_CELLS = ("fp8", "int8")
_KNOWN = frozenset({"rope_scaling", "tie_embeddings", "qkv_bias", "qk_norm"})
"""Variants of models that the kernels compute."""
_TILE = 16  # cells that attention reads at a time, all of one block
_MOST_GROUP = 64  # query heads of a key head: attention has so many of them in one program
_ALIGNED = 16  # bytes: rows of matrices begin at multiples of it
_REMEDIES = (
    "end what else uses the device (nvidia-smi lists it), lower --kv-memory-gb, --max-num-seqs or "
    "--max-num-batched-tokens, or choose a smaller model or --dtype fp8"
)
_NO_MEMORY = ("out of memory", "cublas_status_alloc_failed")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device that this process can compute on."""

    name: str
    device: torch.device
    num_sms: int
    has_dependent_launch: bool  # a kernel may start before its predecessor has ended, and wait for it itself
    total_bytes: int
    bytes_per_s: float  # of its memory, by the data sheet

    def free_bytes(self) -> int:
        """Device memory that could be taken now."""
        return int(torch.cuda.mem_get_info(self.device)[0])


def resolve_dtypes(dtype: str, kv_dtype: str) -> tuple[str, str]:
    """The number formats of weights and of KV cells; ConfigError if this device has none such."""
    weights = "bfloat16" if dtype == "auto" else dtype
    activations = "bfloat16" if weights == "fp8" else weights
    cells = {"auto": activations, "fp16": "float16"}.get(kv_dtype, kv_dtype)
    if weights not in DTYPES or cells not in (activations, *_BYTE_CELLS):
        raise ConfigError(
            f"dtype is {dtype!r} and kv_dtype is {kv_dtype!r}; on a CUDA device allowed are auto, "
            f"{', '.join(DTYPES)} for dtype, and auto, the same, fp8 or int8 for kv_dtype"
        )
    return weights, cells


def known_spec(spec: ModelSpec) -> ModelSpec:
    """The spec without windows, its context cut to the smallest; ConfigError if the kernels lack another variant."""
    cut = spec.cut_to_window()
    strange = beyond(cut, _KNOWN)
    if strange:
        raise ConfigError(
            f"the model's family, {spec.family}, has {', '.join(strange)}, which the CUDA backend does not run; "
            "run it on the CPU (device cpu), or choose a model of llama, mistral, qwen2 or qwen3"
        )
    return cut


def require_sizes(spec: ModelSpec, block_size: int, dtype: str, kv_dtype: str) -> None:
    """ConfigError for sizes that the kernels would compute wrongly or not at all."""
    if block_size % _TILE:
        raise ConfigError(f"block_size is {block_size}; allowed on a CUDA device: multiples of {_TILE}")
    least, group = 18 if kv_dtype in _BYTE_CELLS else 10, spec.heads // spec.kv_heads  # with padding 32 and 16
    if spec.head_dim < least or group > _MOST_GROUP:
        raise ConfigError(
            f"the model has heads of {spec.head_dim}, {group} to a key head; allowed on a CUDA device, with kv_dtype "
            f"{kv_dtype!r}: {least} and more, up to {_MOST_GROUP}"
        )
    step = _ALIGNED // DTYPES[dtype].itemsize
    for name, width in (("hidden", spec.hidden), ("query", spec.q_size), ("intermediate", spec.intermediate)):
        if width % step and dtype != "float32":
            raise ConfigError(
                f"the model's {name} size is {width}; allowed on a CUDA device in {dtype}: multiples of {step}, and "
                "any in float32"
            )


def describe() -> str:
    """What an engine with device = cuda and default options would run on here."""
    reason = missing()
    if reason is not None:
        return f"not usable: {reason}"
    device = open_device()
    return (
        f"{device.name}, {device.free_bytes() / 2**30:.0f} of {device.total_bytes / 2**30:.0f} GiB free; bfloat16, "
        f"{DEFAULT_SLOTS} slots, {DEFAULT_STEP_TOKENS} tokens per step, {POOL_SHARE:.0%} of what weights leave for KV"
    )


def default_slots(target_itl_ms: float | None, read_s: float) -> int:
    """Slots where none are given, `read_s` being the time in which the weights are read once.

    Decode rows that all slots have are to take about half the target: the rest is for prompts. llama-3.1-8b on an H200
    loses 8 % of its capacity to 14 ms with 128 slots and 9 % to 28 ms with 256, but 32 % to 24 ms with 512.
    """
    if target_itl_ms is None:
        return DEFAULT_SLOTS
    times = target_itl_ms * 1e-3 / read_s
    return max(SLOT_STEP, min(DEFAULT_SLOTS, int(times * SLOT_STEP) // SLOT_STEP * SLOT_STEP))


def with_defaults(config: EngineConfig, read_s: float) -> EngineConfig:
    """Slots, step tokens and depth of a CUDA device where none are given; `read_s` as in `default_slots`."""
    wanted = config.scheduler
    rows = wanted.max_num_seqs or default_slots(wanted.target_itl_ms, read_s)
    tokens = wanted.max_num_batched_tokens or max(rows, DEFAULT_STEP_TOKENS)
    depth = wanted.depth or DEFAULT_DEPTH
    return replace(config, scheduler=replace(wanted, max_num_seqs=rows, max_num_batched_tokens=tokens, depth=depth))


def with_pool(cache: CacheConfig, free_bytes: int) -> CacheConfig:
    """The KV pool as configured, or most of the memory that is free."""
    if free_bytes <= 0:
        raise ConfigError(
            f"beside the weights, what steps work on takes {-free_bytes / 2**30:.2f} GiB more of the device's memory "
            f"than is free, and nothing is left for KV: {_REMEDIES}"
        )
    if cache.num_blocks is not None or cache.kv_memory_gb is not None:
        return cache
    return replace(cache, kv_memory_gb=free_bytes * POOL_SHARE / 2**30)


def lacks_memory(error: BaseException) -> bool:
    """Whether a device says that it has no memory left: torch, the driver or a library."""
    found = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in found for words in _NO_MEMORY)
    )


@contextmanager
def within_memory(device: CudaDevice, what: str, wanted: int) -> Iterator[None]:
    """ConfigError if the device's memory does not hold `what`, of about so many bytes."""
    free = 0
    try:
        free = device.free_bytes()
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise ConfigError(
            f"{what} take about {wanted / 2**30:.2f} GiB of the device's memory, of which {free / 2**30:.2f} of "
            f"{device.total_bytes / 2**30:.2f} GiB were free: {_REMEDIES}"
        ) from error


def missing() -> str | None:
    """Why there is no device to compute on; None if there is one."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _bandwidth(facts: object) -> float:
    """Bytes per second of a device's memory; a usual one where the driver does not say."""
    clock = getattr(facts, "memory_clock_rate", 0)  # kHz, two transfers each
    return 2e3 * clock * getattr(facts, "memory_bus_width", 0) / 8 or _USUAL_BYTES_PER_S


def open_device(index: int = 0) -> CudaDevice:
    """The device of that index; ConfigError if it cannot be used."""
    reason = missing()
    if reason is not None:
        raise ConfigError(f"device is 'cuda', but {reason}; allowed here: cpu")
    facts = torch.cuda.get_device_properties(index)
    return CudaDevice(
        name=facts.name,
        device=torch.device("cuda", index),
        num_sms=facts.multi_processor_count,
        has_dependent_launch=facts.major >= 9,
        total_bytes=facts.total_memory,
        bytes_per_s=_bandwidth(facts),
    )


@dataclass(frozen=True, slots=True)
class LoadedCuda:
    """A model in the memory of a CUDA device."""

    source: ModelSource
    spec: ModelSpec
    device: CudaDevice
    weights: ModelWeights[torch.Tensor]
    dtype: str
    kv_dtype: str

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        """Those of a CUDA device."""
        return with_defaults(config, self.weights.num_bytes / self.device.bytes_per_s)

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        """An executor over a KV pool of its own."""
        from headway.kernels.cuda.launch import Launch  # Triton is there only where a device is
        from headway.runner.cuda.assemble import Sizes, make_executor, working_bytes
        from headway.runner.cuda.kvstore import block_bytes

        if config.cache.debug_kv:
            raise ConfigError("debug_kv checks the KV memory of the CPU; leave it out on a CUDA device")
        spec, device, wanted = self.spec, self.device, config.scheduler
        num_rows, num_tokens = wanted.num_slots, wanted.num_tokens
        kv_dtype = KV_DTYPES[self.kv_dtype]
        each = block_bytes(spec, config.cache.block_size, kv_dtype)
        itemsize = self.weights["embed"].itemsize
        beside = working_bytes(spec, num_rows, num_tokens, itemsize)
        free = device.free_bytes() - beside
        cache = with_pool(config.cache, free)
        num_blocks = count_blocks(cache, free_bytes=free, block_bytes=each, max_model_len=max_len)
        host_blocks = count_host_blocks(wanted.swap_space_gb, free_bytes=free_memory(), block_bytes=each)
        sizes = Sizes(
            num_rows, num_blocks, max_len, num_tokens, cache.block_size, host_blocks, wanted.num_plans, kv_dtype
        )
        launch = Launch(device.num_sms, device.has_dependent_launch)
        with within_memory(device, "the KV pool and what steps work on", num_blocks * each + beside):
            return make_executor(spec, self.weights, sizes, launch)

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        return ComputeInfo(self.dtype, self.kv_dtype, f"triton on {self.device.name}")


def load_model(config: EngineConfig) -> LoadedCuda:
    """Find the model and put its weights into the memory of the device."""
    device = open_device()
    dtype, kv_dtype = resolve_dtypes(config.model.dtype, config.cache.kv_dtype)
    from headway.kernels.cuda.products import fix_order  # Triton is there only where a device is
    from headway.runner.cuda.weights import dummy_weights, load_weights

    fix_order()
    source = open_model(config.model)
    wanted, kind = config.model, DTYPES[dtype]
    spec = shape_of(wanted.model_shape) if wanted.model_shape else read_config(source.config, wanted.model_family)
    spec = known_spec(spec)
    require_sizes(spec, config.cache.block_size, dtype, kv_dtype)
    size = sum(param.rows * max(1, param.columns) for param in parameters(spec)) * kind.itemsize
    with within_memory(device, "the weights", size):
        if wanted.dummy_weights:
            weights = dummy_weights(spec, dtype=kind, device=device.device)
        else:
            with shown("weights to the device") as report:
                weights = load_weights(source.stored(), spec, dtype=kind, device=device.device, on_progress=report)
    return LoadedCuda(source, spec, device, weights, dtype, kv_dtype)


PLUGIN: Backend = load_model
