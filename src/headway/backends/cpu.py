"""The CPU as a backend: the model's weights in the layout of the chosen kernels, and executors that run its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.backends._host import free_memory, usable_cores
from headway.backends._seam import Backend, ComputeInfo
from headway.config import EngineConfig
from headway.engine.executor import Executor
from headway.errors import ConfigError
from headway.kernels import library, select
from headway.kernels.checks import Array
from headway.kernels.formats import resolve_dtype, resolve_kv_dtype
from headway.kernels.ops import KernelSet
from headway.modelfile.source import ModelSource, open_model
from headway.models.decoder import Decoder
from headway.models.native import fit_kernels, make_decoder
from headway.models.params import ModelWeights
from headway.models.registry import read_config
from headway.models.shapes import shape_of
from headway.models.shard import WHOLE, Gather, Shard, check_split
from headway.models.spec import ModelSpec
from headway.runner.adapters import AdapterStore
from headway.runner.debug_kv import DebugKVStore
from headway.runner.draft import DraftModel
from headway.runner.dummy import DummyTensors
from headway.runner.executor import CpuExecutor
from headway.runner.kvstore import KVStore
from headway.runner.memory import block_bytes, count_blocks, count_host_blocks
from headway.runner.slots import Slots
from headway.runner.step_model import StepModel
from headway.runner.weights import load_weights


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU as this process computes on it: two engines on equal ones compute equal bits."""

    dtype: str
    """Number format of the weights, resolved: float32, bfloat16, int8 or q4."""
    kernels: KernelSet
    threads: int
    free_bytes: Callable[[], int] = free_memory
    """Memory that is free now, without pushing other processes out."""


def open_device(kernels: str = "auto", threads: int | None = None, dtype: str = "auto") -> CpuDevice:
    """The CPU on `threads` threads, every usable core if not given."""
    chosen = _on_a_cpu("dtype", resolve_dtype(dtype, library.chosen_level(kernels)))
    count = usable_cores() if threads is None else threads
    return CpuDevice(chosen, select.load(kernels, count, chosen), count)


@dataclass(frozen=True, slots=True)
class LoadedCpu:
    """A model in the memory of the host."""

    source: ModelSource
    spec: ModelSpec
    device: CpuDevice
    decoder: StepModel
    shard: Shard = WHOLE  # the part of the model that this process has
    draft: LoadedCpu | None = None  # a smaller model of the same vocabulary, which guesses tokens for this one

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        """As it is: the configuration's own defaults are meant for the CPU."""
        return config

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        """An executor over a KV pool of its own."""
        return self.make_sized(config, max_len, *self.count_blocks(config, max_len))

    def make_sized(self, config: EngineConfig, max_len: int, num_blocks: int, host_blocks: int) -> Executor:
        """The same with as many blocks as are named."""
        slots = Slots(
            num_rows=config.scheduler.num_slots,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_len=max_len,
            vocab_size=self.spec.vocab_size,
            adapters=self._adapters(config),
        )
        # Waiting for every step, the engine's thread may as well run it: handing it to another costs 0.1 to 0.3 ms.
        has_thread = config.scheduler.num_plans > 1
        kv, draft = self._make_kv(config, num_blocks, host_blocks), None
        if self.draft is not None:
            own = self.draft._make_kv(config, num_blocks, host_blocks)
            draft = DraftModel(self.draft.decoder, own, slots, self.draft.spec.max_len)
        return CpuExecutor(self.decoder, kv, slots, has_thread=has_thread, draft=draft)

    def _adapters(self, config: EngineConfig) -> AdapterStore | None:
        if self.shard.size > 1:
            return None
        most_bytes = int(config.model.adapter_memory_gb * 2**30)
        return AdapterStore(self.spec, self.device.kernels, self.device.dtype, most_bytes)

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        """What the kernels say of themselves."""
        dtype, kernels = self.device.dtype, self.device.kernels
        return ComputeInfo(dtype, self._kv_dtype(config), kernels.name, kernels.fallback, kernels.digest)

    def _kv_dtype(self, config: EngineConfig) -> str:
        return _on_a_cpu("kv_dtype", resolve_kv_dtype(config.cache.kv_dtype, self.device.dtype))

    def count_blocks(self, config: EngineConfig, max_len: int) -> tuple[int, int]:
        """Blocks of the KV pool, and of the host memory beside it; several parts of a model share this memory."""
        free, each = self.device.free_bytes(), self._block_bytes(config)
        num_blocks = count_blocks(config.cache, free_bytes=free, block_bytes=each, max_model_len=max_len)
        left = free - num_blocks * each
        return num_blocks, count_host_blocks(config.scheduler.swap_space_gb, free_bytes=left, block_bytes=each)

    def _block_bytes(self, config: EngineConfig) -> int:
        """Of one block, here and in the draft model's store."""
        spec = self.spec
        own = block_bytes(
            layers=spec.layers,
            block_size=config.cache.block_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kv_dtype=self._kv_dtype(config),
        )
        return own if self.draft is None else own + self.draft._block_bytes(config)

    def _make_kv(self, config: EngineConfig, num_blocks: int, host_blocks: int) -> KVStore:
        """The KV memory of so many blocks, in the format this configuration comes to."""
        spec = self.spec
        kind = DebugKVStore if config.cache.debug_kv else KVStore
        kv = kind(
            layers=spec.layers,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            kv_heads=len(self.shard.share(spec.kv_heads)),
            head_dim=spec.head_dim,
            kv_dtype=self._kv_dtype(config),
            host_blocks=host_blocks,
        )
        if config.cache.touch_kv:
            kv.touch()
        return kv


def load_model(config: EngineConfig) -> LoadedCpu:
    """Find the model, convert it if this is the first time, and map it into memory."""
    source, spec, device = _find(config)
    device = replace(device, kernels=fit_kernels(device.kernels, spec))
    weights = _weights(config, source, spec, device, WHOLE)
    return LoadedCpu(source, spec, device, make_decoder(spec, weights, device.kernels), draft=_load_draft(config, spec))


def _load_draft(config: EngineConfig, spec: ModelSpec) -> LoadedCpu | None:
    """The draft model that the configuration names, if there is one."""
    name = config.scheduler.draft_model
    if name is None or config.scheduler.speculation not in ("auto", "model"):
        return None
    own = replace(config.model, model=name, model_family=None, model_shape=None, max_model_len=None)
    draft = load_model(replace(config, model=own, scheduler=replace(config.scheduler, draft_model=None)))
    if draft.spec.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"draft_model {name!r} has {draft.spec.vocab_size} tokens and the model {spec.vocab_size}; a draft model "
            "must have the vocabulary of the model it guesses for"
        )
    return draft


def load_shard(config: EngineConfig, shard: Shard, gather: Gather) -> tuple[LoadedCpu, Decoder]:
    """One part of a model, computed by single operations."""
    source, spec, device = _find(config)
    check_split(spec, shard.size)
    device = replace(device, kernels=replace(device.kernels, native=None))
    weights = _weights(config, source, spec, device, shard)
    decoder = Decoder(spec, weights, device.kernels, shard, gather)
    return LoadedCpu(source, spec, device, decoder, shard), decoder


def _find(config: EngineConfig) -> tuple[ModelSource, ModelSpec, CpuDevice]:
    wanted = config.model
    source = open_model(wanted)
    spec = shape_of(wanted.model_shape) if wanted.model_shape else read_config(source.config, wanted.model_family)
    return source, spec, open_device(wanted.kernels, wanted.threads, wanted.dtype)


def _weights(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, device: CpuDevice, shard: Shard
) -> ModelWeights[Array]:
    tensors = DummyTensors(source.digest, spec) if config.model.dummy_weights else source
    return load_weights(tensors, spec, source.cache, device.kernels, shard)


def _on_a_cpu(field: str, dtype: str) -> str:
    if dtype in ("fp8", "float16"):
        raise ConfigError(f"{field} is {dtype!r}, which only a CUDA device computes in; take int8 or device = cuda")
    return dtype


PLUGIN: Backend = load_model
