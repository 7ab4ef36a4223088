"""The engine's numbers as a front end asks for them: counters since start and gauges of now, from all that counts."""

from __future__ import annotations

from headway.core.scheduler import Scheduler
from headway.engine.client import Stats
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import BlockMover
from headway.engine.speculating import Speculation


def stats_of(
    metrics: EngineMetrics, scheduler: Scheduler, mover: BlockMover | None, speculation: Speculation | None
) -> Stats:
    """What the parts have counted; those that are not there have counted nothing."""
    ledger, rows = scheduler.state.ledger, scheduler.state.rows
    return Stats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        blocks_total=ledger.num_blocks,
        blocks_free=ledger.num_free,
        blocks_cached=ledger.num_idle,
        live_tokens=sum(rows.num_computed(req) for req in rows.running()),
        preemptions=metrics.preemptions,
        swaps=metrics.swaps,
        preemptions_protected=metrics.preemptions_protected,
        tokens_computed=metrics.computed,
        tokens_generated=metrics.generated,
        tokens_recomputed=metrics.recomputed,
        tokens_cached=metrics.cached,
        tokens_from_tier=0 if mover is None else mover.tokens_from_tier,
        tokens_from_peers=0 if mover is None else mover.tokens_from_peers,
        failed_loads=0 if mover is None else mover.num_failed,
        block_copies=metrics.copies,
        steps=metrics.steps,
        tokens_drafted=0 if speculation is None else speculation.num_drafted,
        tokens_accepted=0 if speculation is None else speculation.num_accepted,
        drafts=0 if speculation is None else speculation.num_drafts,
        finished=dict(metrics.finished),
        waited=dict(metrics.waited),
    )
