"""The composition root: a configuration becomes an engine. The only place that constructs the whole graph.

It knows no device and no torch: the backend that the configuration names loads the model and makes the executor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headway import plugins
from headway.backends._seam import Backend, ComputeInfo, LoadedModel
from headway.cluster.fetch_config import THIS_MACHINE, FetchConfig
from headway.cluster.fetch_peers import FetchPeers
from headway.cluster.fetch_server import FetchServer
from headway.config import ROLES, EngineConfig
from headway.config_text import parse_adapters, parse_shares
from headway.control.costs import CostModel
from headway.control.pacer import TargetPacer
from headway.control.slo_admission import SloAdmission
from headway.core.ledger import KVLedger
from headway.core.scheduler import Scheduler
from headway.engine.adapters import EngineAdapters
from headway.engine.block_log import BlockLog
from headway.engine.client import EngineInfo
from headway.engine.clock import MonotonicClock
from headway.engine.constrained import Constraints
from headway.engine.decisions import DecisionJournal
from headway.engine.engine import Engine
from headway.engine.executor import Capacity, Executor, MovesBlocks, TakesAdapters
from headway.engine.metrics import EngineMetrics, StepLog
from headway.engine.mover import BlockMover
from headway.engine.published import LaneBacklog
from headway.engine.settings import limits_of
from headway.engine.speculating import Speculation
from headway.engine.tier.make import block_identity, make_keeper
from headway.engine.tuning import Tuning
from headway.errors import ConfigError
from headway.fingerprint import source_digest
from headway.grammar.compiler import GrammarCompiler
from headway.grammar.matcher import GrammarVocabulary
from headway.modelfile.cache import default_root
from headway.policies._build import build_gate, build_policy
from headway.policies._caps import REQUEST_SHARE, Capped

log = logging.getLogger(__name__)


def load(config: EngineConfig) -> LoadedModel:
    """The model where the configuration wants it."""
    name = config.model.device if config.model.tensor_parallel == 1 else "parallel"
    backend: Backend = plugins.load("backends", name)
    return backend(config)


def context_length(config: EngineConfig, loaded: LoadedModel) -> int:
    """Longest prompt plus answer: the model's, or what is asked for within it."""
    wanted, limit, told = config.model.max_model_len, loaded.spec.max_len, loaded.source.config
    if wanted is not None and wanted > limit:
        reason = f"this model's context allows at most {limit}"
        if _window(loaded):
            own = told.get("max_position_embeddings")
            reason = f"this model attends in a sliding window of {limit} tokens (its context is {own}), and headway "
            reason += f"runs such a model only within its window: give {limit} or less"
        raise ConfigError(f"max_model_len is {wanted}; {reason}")
    return wanted or limit


def _window(loaded: LoadedModel) -> int:
    """The sliding window that the model's context is cut to; 0 if it is not."""
    told, limit = loaded.source.config, loaded.spec.max_len
    return limit if told.get("sliding_window") == limit != told.get("max_position_embeddings") else 0


def build_engine(
    config: EngineConfig,
    loaded: LoadedModel | None = None,
    *,
    keeps_tokens: bool = False,
    appends_log: bool = False,
    around: Callable[[Executor], Executor] = lambda executor: executor,
    fetching: FetchConfig = THIS_MACHINE,
) -> Engine:
    """An engine of its own KV pool over a model; `keeps_tokens` as in `Engine`, `around` may wrap what computes.

    `appends_log`: the step log goes on where that of an engine before ended. `fetching`: where others fetch its KV.
    """
    loaded = loaded or load(config)
    config, max_len = loaded.with_defaults(config), context_length(config, loaded)
    executor = loaded.make(config, max_len)
    capacity, computes = executor.capacity(), loaded.compute_info(config)
    info = _describe(config, loaded, computes, capacity, max_len)
    clock = MonotonicClock()
    step_log = config.scheduler.step_log
    metrics = EngineMetrics(clock, StepLog(Path(step_log), appends=appends_log) if step_log else None)
    blocks = BlockLog()
    scheduler = build_scheduler(
        config, capacity.num_blocks, metrics, capacity.host_blocks, blocks, step_sizes=capacity.step_sizes
    )
    metrics.journal = DecisionJournal(scheduler.state.costs)
    speculation = _make_speculation(config, scheduler, capacity)
    info = info if speculation is None else replace(info, speculation="model" if capacity.drafts else "suffix")
    mover, info = _make_mover(config, executor, scheduler, info, fetching)
    blocks.also = None if mover is None else mover.told
    engine = Engine(
        scheduler,
        around(executor),
        info,
        metrics,
        clock,
        identity=info.identity,
        depth=config.scheduler.num_plans,
        max_waiting=config.scheduler.max_waiting,
        keeps_tokens=keeps_tokens,
        tuning=Tuning(config.scheduler, scheduler),
        slo_admission=SloAdmission(scheduler.state.policy, scheduler.state.costs),
        blocks=blocks,
        mover=mover,
        constraints=_make_constraints(loaded, scheduler, verifies=capacity.verifies),
        speculation=speculation,
    )
    _add_adapters(config, executor, engine, is_again=appends_log)
    return engine


def _add_adapters(config: EngineConfig, executor: Executor, engine: Engine, *, is_again: bool) -> None:
    """Load those of the configuration. Where an engine was before, one that cannot be had any more is left out."""
    wanted = config.model
    memory = executor.adapters if isinstance(executor, TakesAdapters) else None
    where = wanted.device if wanted.tensor_parallel == 1 else f"tensor_parallel {wanted.tensor_parallel}"
    engine.adapters = EngineAdapters(engine, memory, where)
    for source in parse_adapters(wanted.adapter):
        try:
            engine.adapters.load_now(source)
        except ConfigError as error:
            if not is_again:
                engine.close()
                raise
            log.error("adapter %s is not loaded again, and its requests fail: %s", source.name, error)


def _make_speculation(config: EngineConfig, scheduler: Scheduler, capacity: Capacity) -> Speculation | None:
    """What guesses tokens ahead; None: nothing does."""
    wanted = config.scheduler
    is_model = wanted.speculation == "model" or (wanted.speculation == "auto" and wanted.draft_model is not None)
    if is_model and not capacity.drafts:
        raise ConfigError(
            f"speculation is {wanted.speculation!r} with draft_model {wanted.draft_model!r}; it needs one, on device "
            f"cpu (here {config.model.device!r}) and without tensor_parallel: give it, or take auto without draft_model"
        )
    if wanted.speculation == "off" or (wanted.speculation == "auto" and not (is_model or capacity.guesses)):
        return None
    if not capacity.verifies:
        raise ConfigError(
            f"speculation is {wanted.speculation!r}, and device {config.model.device!r} verifies no draft tokens; "
            "allowed there: off, auto"
        )
    return Speculation(
        scheduler,
        most=wanted.max_draft_tokens,
        depth=wanted.num_plans,
        has_model=is_model,
        takes_penalties=capacity.verifies_penalized,
    )


def _make_constraints(loaded: LoadedModel, scheduler: Scheduler, *, verifies: bool) -> Constraints:
    """What holds answers to grammars; nothing is read before the first one comes."""
    source, spec = loaded.source, loaded.spec
    vocabulary = GrammarVocabulary(lambda: source.tokenizer_path(), spec.vocab_size, source.eos_ids)
    return Constraints(GrammarCompiler(vocabulary), scheduler, verifies=verifies)


def _make_mover(
    config: EngineConfig, executor: Executor, scheduler: Scheduler, info: EngineInfo, fetching: FetchConfig
) -> tuple[BlockMover | None, EngineInfo]:
    """What carries KV in and out of the pool, and what peers must know of it; None: nothing is to be carried."""
    cache, role = config.cache, config.scheduler.role
    is_asked = bool(role != "both" or (fetching.listen and not fetching.has_siblings))
    can_move = isinstance(executor, MovesBlocks) and cache.prefix_caching
    has_peers = is_asked or (fetching.has_siblings and can_move)
    if not (cache.kv_host_bytes or cache.kv_disk_bytes or has_peers):
        return None, info
    if not isinstance(executor, MovesBlocks):
        raise ConfigError(
            "role, kv_listen, kv_host_bytes and kv_disk_bytes need KV that can be moved block by block, which device "
            f"{config.model.device!r} with tensor_parallel {config.model.tensor_parallel} cannot; leave them out"
        )
    if not cache.prefix_caching or role not in ROLES:
        raise ConfigError(f"role is {role!r}; an engine has one of {', '.join(ROLES)}, and prefix_caching")
    identity = block_identity(info, executor.block_layout())
    models = Path(config.model.cache_dir).expanduser() if config.model.cache_dir else default_root()
    folder = Path(cache.kv_disk_dir).expanduser() if cache.kv_disk_dir else models.with_name(f"{models.name}-kv")
    size = executor.block_bytes()
    peers = FetchPeers(identity, size, fetching) if has_peers else None
    mover = BlockMover(scheduler, executor, tier=make_keeper(cache, folder, identity, size), peers=peers)
    if has_peers:
        mover.server = server = FetchServer(mover, identity, size, fetching)
        info = replace(info, fetch_at=server.address)
    return mover, replace(info, role=role)


def _describe(
    config: EngineConfig, loaded: LoadedModel, computes: ComputeInfo, capacity: Capacity, max_len: int
) -> EngineInfo:
    """What there is to know about the engine, in the log too."""
    info = EngineInfo(
        model=config.model.served_model_name or loaded.source.name,
        max_model_len=max_len,
        vocab_size=loaded.spec.vocab_size,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_num_seqs=capacity.num_rows,
        lacks=capacity.lacks,
        eos_ids=loaded.source.eos_ids,
        source_digest=source_digest(),
        debug_kv=config.cache.debug_kv,
        lanes=tuple(parse_shares(config.scheduler.lanes, "lanes")),
        identity=f"{loaded.source.digest}:{computes.dtype}:{computes.kv_dtype}:{capacity.block_size}",
        sliding_window=_window(loaded) if max_len == loaded.spec.max_len else 0,
        **asdict(computes),
    )
    log.info("%s weights, %s KV, %s kernels", info.dtype, info.kv_dtype, info.kernels)
    log.info("kernel library %s, source tree %s", info.kernels_digest or "none", info.source_digest)
    if info.debug_kv:
        log.warning("every read of the KV cache is checked (debug_kv): slow, not for service")
    context = f"{max_len}, the model's sliding window" if info.sliding_window else str(max_len)
    blocks = (info.num_blocks, info.block_size)
    log.info("%d KV blocks of %d tokens, %d slots, context %s", *blocks, info.max_num_seqs, context)
    if capacity.host_blocks:
        log.info("%d more KV blocks of host memory for preempted requests", capacity.host_blocks)
    return info


def build_scheduler(
    config: EngineConfig,
    num_blocks: int,
    metrics: EngineMetrics,
    host_blocks: int = 0,
    blocks: BlockLog | None = None,
    *,
    step_sizes: Sequence[int] = (),
) -> Scheduler:
    """The production scheduler over a ledger of so many blocks; `step_sizes` as in `Capacity`."""
    wanted, costs = config.scheduler, CostModel()
    ledger = KVLedger(
        num_blocks,
        config.cache.block_size,
        host_blocks=host_blocks,
        caching=config.cache.prefix_caching,
        names_released=config.cache.debug_kv,
        told=blocks,
    )
    policy = build_policy(wanted)
    if wanted.batching == "continuous":
        policy = Capped(policy, wanted.num_slots)
    target = None if wanted.target_itl_ms is None else wanted.target_itl_ms / 1e3
    return Scheduler(
        ledger,
        limits_of(wanted, num_blocks=num_blocks, swaps=host_blocks > 0),
        policy,
        sink=metrics,
        pacer=TargetPacer(costs, target, config.cache.block_size, step_sizes),
        gate=build_gate(wanted),
        costs=costs,
        observer=LaneBacklog(parse_shares(wanted.lanes, "lanes"), max(1, wanted.num_slots // REQUEST_SHARE)),
    )
