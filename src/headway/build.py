"""The composition root: a configuration becomes an engine. The only place that constructs the whole graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.backends import cpu
from headway.backends.backend import Backend
from headway.backends.formats import resolve_kv_dtype
from headway.config import EngineConfig, parse_shares
from headway.control.costs import CostModel
from headway.control.door import Door
from headway.control.forecast import Backlog
from headway.control.pacer import TargetPacer
from headway.core.ledger import KVLedger
from headway.core.scheduler import Scheduler
from headway.engine.books import Books, StepLog
from headway.engine.client import EngineInfo
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.executor import Executor
from headway.engine.settings import limits_of
from headway.engine.tuning import Tuning
from headway.errors import ConfigError
from headway.fingerprint import source_digest
from headway.modelfile.cache import ModelCache, default_root
from headway.modelfile.source import ModelSource, resolve
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder, make_decoder
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


def model_cache(config: EngineConfig) -> ModelCache:
    folder = config.model.cache_dir
    return ModelCache(Path(folder).expanduser() if folder else default_root())


def load_model(config: EngineConfig, source: ModelSource | None = None) -> Loaded:
    """Find the model, convert it if this is the first time, and map it into memory."""
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
    loaded: Loaded | None = None,
    *,
    keeps_tokens: bool = False,
    around: Callable[[Executor], Executor] = lambda executor: executor,
) -> Engine:
    """An engine of its own KV pool over a model; `keeps_tokens` as in `Engine`, `around` may wrap what computes."""
    loaded = loaded or load_model(config)
    spec, cache, backend = loaded.spec, config.cache, loaded.backend
    kv_dtype = resolve_kv_dtype(cache.kv_dtype, backend.dtype)
    max_len = context_length(config, spec)
    num_blocks, host_blocks = _count_blocks(config, loaded, max_len)
    num_rows = config.scheduler.num_seats
    slots = Slots(
        num_rows=num_rows,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_len=max_len,
        vocab_size=spec.vocab_size,
    )
    # Waiting for every step, the engine's thread may as well run it: handing it to another costs 0.1 to 0.3 ms.
    has_thread = config.scheduler.depth > 1
    kv = make_kv(config, loaded, num_blocks, host_blocks)
    executor = around(TorchExecutor(loaded.decoder, kv, slots, has_thread=has_thread))
    info = _describe(config, loaded, max_len, num_blocks)
    if host_blocks:
        log.info("%d more KV blocks of host memory for the preempted", host_blocks)
    clock = MonotonicClock()
    step_log = config.scheduler.step_log
    books = Books(clock, StepLog(Path(step_log)) if step_log else None)
    scheduler = build_scheduler(config, num_blocks, books, host_blocks)
    return Engine(
        scheduler,
        executor,
        info,
        books,
        clock,
        identity=f"{loaded.source.digest}:{backend.dtype}:{kv_dtype}:{cache.block_size}",
        depth=config.scheduler.depth,
        max_waiting=config.scheduler.max_waiting,
        keeps_tokens=keeps_tokens,
        tuning=Tuning(config.scheduler, scheduler),
        door=Door(scheduler.state.policy, scheduler.state.costs),
    )


def _describe(config: EngineConfig, loaded: Loaded, max_len: int, num_blocks: int) -> EngineInfo:
    """What there is to know about the engine, in the log too."""
    cache, backend, num_rows = config.cache, loaded.backend, config.scheduler.num_seats
    kv_dtype = resolve_kv_dtype(cache.kv_dtype, backend.dtype)
    info = EngineInfo(
        model=config.model.served_model_name or loaded.source.name,
        max_model_len=max_len,
        vocab_size=loaded.spec.vocab_size,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        max_num_seqs=num_rows,
        eos_ids=loaded.source.eos_ids,
        dtype=backend.dtype,
        kv_dtype=kv_dtype,
        kernels=backend.kernels.name,
        kernels_fallback=backend.kernels.fallback,
        kernels_digest=backend.kernels.digest,
        source_digest=source_digest(),
        debug_kv=cache.debug_kv,
        lanes=tuple(parse_shares(config.scheduler.lanes, "lanes")),
    )
    log.info("%s weights, %s KV, %s kernels, %d threads", backend.dtype, kv_dtype, info.kernels, backend.threads)
    log.info("kernel library %s, source tree %s", info.kernels_digest or "none", info.source_digest)
    if info.debug_kv:
        log.warning("every read of the KV cache is checked (debug_kv): slow, not for service")
    log.info("%d KV blocks of %d tokens, %d seats, context %d", num_blocks, cache.block_size, num_rows, max_len)
    return info


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


def build_scheduler(config: EngineConfig, num_blocks: int, books: Books, host_blocks: int = 0) -> Scheduler:
    """The production scheduler over a ledger of so many blocks."""
    wanted, costs = config.scheduler, CostModel()
    ledger = KVLedger(num_blocks, config.cache.block_size, host_blocks=host_blocks, caching=config.cache.prefix_caching)
    target = None if wanted.target_itl_ms is None else wanted.target_itl_ms / 1e3
    return Scheduler(
        ledger,
        limits_of(wanted, num_blocks=num_blocks, swaps=host_blocks > 0),
        build_policy(wanted),
        sink=books,
        pacer=TargetPacer(costs, target, config.cache.block_size),
        gate=build_gate(wanted),
        costs=costs,
        observer=Backlog(),
    )
