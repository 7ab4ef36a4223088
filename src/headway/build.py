"""The composition root: a configuration becomes an engine. The only place that constructs the whole graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headway.backends import cpu, cuda
from headway.backends.backend import Backend
from headway.backends.cuda import CudaDevice
from headway.backends.formats import resolve_kv_dtype
from headway.config import EngineConfig, parse_shares
from headway.control.costs import CostModel
from headway.control.forecast import Backlog
from headway.control.pacer import TargetPacer
from headway.control.slo_admission import SloAdmission
from headway.core.ledger import KVLedger
from headway.core.scheduler import Scheduler
from headway.engine.client import EngineInfo
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.executor import Executor
from headway.engine.metrics import EngineMetrics, StepLog
from headway.engine.settings import limits_of
from headway.engine.tuning import Tuning
from headway.errors import ConfigError
from headway.fingerprint import source_digest
from headway.modelfile.cache import ModelCache, default_root
from headway.modelfile.source import ModelSource, resolve
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder, make_decoder
from headway.models.params import ModelWeights
from headway.models.registry import read_config
from headway.models.spec import ModelSpec
from headway.policies._build import build_gate, build_policy
from headway.runner.debug_kv import DebugKVStore
from headway.runner.executor import TorchExecutor
from headway.runner.kvstore import KVStore
from headway.runner.memory import block_bytes, count_blocks, count_host_blocks
from headway.runner.slots import Slots
from headway.runner.weights import load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, ready to be put behind any number of engines."""

    source: ModelSource
    spec: ModelSpec
    backend: Backend
    decoder: Decoder | NativeDecoder


@dataclass(frozen=True, slots=True)
class LoadedCuda:
    """A model in the memory of a CUDA device."""

    source: ModelSource
    spec: ModelSpec
    device: CudaDevice
    weights: ModelWeights
    dtype: str


@dataclass(frozen=True, slots=True)
class _Made:
    """An executor and what an engine says about it."""

    executor: Executor
    num_blocks: int
    host_blocks: int
    dtype: str
    kv_dtype: str
    kernels: str
    kernels_fallback: str = ""
    kernels_digest: str = ""


def model_cache(config: EngineConfig) -> ModelCache:
    folder = config.model.cache_dir
    return ModelCache(Path(folder).expanduser() if folder else default_root())


def load(config: EngineConfig) -> Loaded | LoadedCuda:
    """The model where the configuration wants it."""
    return load_model(config) if config.model.device == "cpu" else _load_cuda(config)


def _load_cuda(config: EngineConfig) -> LoadedCuda:
    device = cuda.open_device()
    dtype = cuda.resolve_dtype(config.model.dtype, config.cache.kv_dtype)
    from headway.kernels.cuda.products import fix_order  # Triton is there only where a device is
    from headway.runner.cuda.weights import load_weights as load_to_device

    fix_order()
    source = resolve(config.model.model, model_cache(config))
    spec = read_config(source.config)
    weights = load_to_device(source.tensors(), spec, dtype=cuda.DTYPES[dtype], device=device.device)
    return LoadedCuda(source, spec, device, weights, dtype)


def load_model(config: EngineConfig, source: ModelSource | None = None) -> Loaded:
    """Find the model, convert it if this is the first time, and map it into memory; for the CPU."""
    source = source or resolve(config.model.model, model_cache(config))
    spec = read_config(source.config)
    backend = cpu.make(config.model.kernels, config.model.threads, config.model.dtype)
    weights = load_weights(source, spec, source.cache, backend.kernels)
    return Loaded(source, spec, backend, make_decoder(spec, weights, backend.kernels))


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is not None and wanted > spec.max_len:
        raise ConfigError(f"max_model_len is {wanted}; this model's context allows at most {spec.max_len}")
    return wanted or spec.max_len


def build_engine(
    config: EngineConfig,
    loaded: Loaded | LoadedCuda | None = None,
    *,
    keeps_tokens: bool = False,
    around: Callable[[Executor], Executor] = lambda executor: executor,
) -> Engine:
    """An engine of its own KV pool over a model; `keeps_tokens` as in `Engine`, `around` may wrap what computes."""
    loaded = loaded or load(config)
    cache, max_len = config.cache, context_length(config, loaded.spec)
    if isinstance(loaded, LoadedCuda):
        config = _for_cuda(config)
        made = _make_cuda(config, loaded, max_len)
    else:
        made = _make_cpu(config, loaded, max_len)
    executor, num_blocks, host_blocks = around(made.executor), made.num_blocks, made.host_blocks
    info = _describe(config, loaded, made, max_len)
    if host_blocks:
        log.info("%d more KV blocks of host memory for the preempted", host_blocks)
    clock = MonotonicClock()
    step_log = config.scheduler.step_log
    metrics = EngineMetrics(clock, StepLog(Path(step_log)) if step_log else None)
    scheduler = build_scheduler(config, num_blocks, metrics, host_blocks)
    return Engine(
        scheduler,
        executor,
        info,
        metrics,
        clock,
        identity=f"{loaded.source.digest}:{made.dtype}:{made.kv_dtype}:{cache.block_size}",
        depth=config.scheduler.depth,
        max_waiting=config.scheduler.max_waiting,
        keeps_tokens=keeps_tokens,
        tuning=Tuning(config.scheduler, scheduler),
        slo_admission=SloAdmission(scheduler.state.policy, scheduler.state.costs),
    )


def _describe(config: EngineConfig, loaded: Loaded | LoadedCuda, made: _Made, max_len: int) -> EngineInfo:
    """What there is to know about the engine, in the log too."""
    cache, num_blocks, num_rows = config.cache, made.num_blocks, config.scheduler.num_slots
    info = EngineInfo(
        model=config.model.served_model_name or loaded.source.name,
        max_model_len=max_len,
        vocab_size=loaded.spec.vocab_size,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        max_num_seqs=num_rows,
        eos_ids=loaded.source.eos_ids,
        dtype=made.dtype,
        kv_dtype=made.kv_dtype,
        kernels=made.kernels,
        kernels_fallback=made.kernels_fallback,
        kernels_digest=made.kernels_digest,
        source_digest=source_digest(),
        debug_kv=cache.debug_kv,
        lanes=tuple(parse_shares(config.scheduler.lanes, "lanes")),
    )
    log.info("%s weights, %s KV, %s kernels", info.dtype, info.kv_dtype, info.kernels)
    log.info("kernel library %s, source tree %s", info.kernels_digest or "none", info.source_digest)
    if info.debug_kv:
        log.warning("every read of the KV cache is checked (debug_kv): slow, not for service")
    log.info("%d KV blocks of %d tokens, %d slots, context %d", num_blocks, cache.block_size, num_rows, max_len)
    return info


def _make_cpu(config: EngineConfig, loaded: Loaded, max_len: int) -> _Made:
    num_blocks, host_blocks = _count_blocks(config, loaded, max_len)
    slots = Slots(
        num_rows=config.scheduler.num_slots,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_len=max_len,
        vocab_size=loaded.spec.vocab_size,
    )
    # Waiting for every step, the engine's thread may as well run it: handing it to another costs 0.1 to 0.3 ms.
    has_thread = config.scheduler.depth > 1
    kv = make_kv(config, loaded, num_blocks, host_blocks)
    executor = TorchExecutor(loaded.decoder, kv, slots, has_thread=has_thread)
    backend = loaded.backend
    kv_dtype = resolve_kv_dtype(config.cache.kv_dtype, backend.dtype)
    return _Made(
        *(executor, num_blocks, host_blocks, backend.dtype, kv_dtype),
        kernels=backend.kernels.name,
        kernels_fallback=backend.kernels.fallback,
        kernels_digest=backend.kernels.digest,
    )


def _for_cuda(config: EngineConfig) -> EngineConfig:
    """Slots and step tokens of a CUDA device where none are given."""
    wanted = config.scheduler
    rows = wanted.max_num_seqs or cuda.DEFAULT_SLOTS
    tokens = wanted.max_num_batched_tokens or max(rows, cuda.DEFAULT_STEP_TOKENS)
    return replace(config, scheduler=replace(wanted, max_num_seqs=rows, max_num_batched_tokens=tokens))


def _make_cuda(config: EngineConfig, loaded: LoadedCuda, max_len: int) -> _Made:
    from headway.kernels.cuda.launch import Launch  # Triton is there only where a device is
    from headway.runner.cuda.assemble import Sizes, make_executor, working_bytes

    if config.cache.debug_kv:
        raise ConfigError("debug_kv checks the KV memory of the CPU; leave it out on a CUDA device")
    spec, device, wanted = loaded.spec, loaded.device, config.scheduler
    num_rows, num_tokens = wanted.num_slots, wanted.num_tokens
    itemsize = cuda.DTYPES[loaded.dtype].itemsize
    each = spec.layers * 2 * config.cache.block_size * spec.kv_size * itemsize
    free = device.free_bytes() - working_bytes(spec, num_rows, num_tokens, itemsize)
    cache = cuda.with_pool(config.cache, free)
    num_blocks = count_blocks(cache, free_bytes=free, block_bytes=each, max_model_len=max_len)
    host_blocks = count_host_blocks(wanted.swap_space_gb, free_bytes=cpu.free_memory(), block_bytes=each)
    sizes = Sizes(num_rows, num_blocks, max_len, num_tokens, cache.block_size, host_blocks, wanted.depth)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    executor = make_executor(spec, loaded.weights, sizes, launch)
    return _Made(executor, num_blocks, host_blocks, loaded.dtype, loaded.dtype, f"triton on {device.name}")


def _count_blocks(config: EngineConfig, loaded: Loaded, max_len: int) -> tuple[int, int]:
    """Blocks of the KV pool, and of the host memory beside it."""
    free, each = loaded.backend.free_bytes(), _block_bytes(config, loaded)
    num_blocks = count_blocks(config.cache, free_bytes=free, block_bytes=each, max_model_len=max_len)
    left = free - num_blocks * each
    return num_blocks, count_host_blocks(config.scheduler.swap_space_gb, free_bytes=left, block_bytes=each)


def make_kv(config: EngineConfig, loaded: Loaded, num_blocks: int, host_blocks: int = 0) -> KVStore:
    """The KV memory of so many blocks, in the format this configuration comes to."""
    spec = loaded.spec
    kind = DebugKVStore if config.cache.debug_kv else KVStore
    kv = kind(
        layers=spec.layers,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=resolve_kv_dtype(config.cache.kv_dtype, loaded.backend.dtype),
        host_blocks=host_blocks,
    )
    if config.cache.touch_kv:
        kv.touch()
    return kv


def _block_bytes(config: EngineConfig, loaded: Loaded) -> int:
    spec = loaded.spec
    return block_bytes(
        layers=spec.layers,
        block_size=config.cache.block_size,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=resolve_kv_dtype(config.cache.kv_dtype, loaded.backend.dtype),
    )


def build_scheduler(config: EngineConfig, num_blocks: int, metrics: EngineMetrics, host_blocks: int = 0) -> Scheduler:
    """The production scheduler over a ledger of so many blocks."""
    wanted, costs = config.scheduler, CostModel()
    ledger = KVLedger(
        num_blocks,
        config.cache.block_size,
        host_blocks=host_blocks,
        caching=config.cache.prefix_caching,
        names_released=config.cache.debug_kv,
    )
    target = None if wanted.target_itl_ms is None else wanted.target_itl_ms / 1e3
    return Scheduler(
        ledger,
        limits_of(wanted, num_blocks=num_blocks, swaps=host_blocks > 0),
        build_policy(wanted),
        sink=metrics,
        pacer=TargetPacer(costs, target, config.cache.block_size),
        gate=build_gate(wanted),
        costs=costs,
        observer=Backlog(),
    )
