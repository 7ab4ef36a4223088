"""Plan replay: scripted loads must give the very plans on record, byte for byte.

A refactoring of the core changes none of them. A change that means to alter plans records them anew with
`scripts/test tests/golden --record-plans`, and its commit says `Plan-Change:` with the reason.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan

RECORD = Path(__file__).parent / "plans.json"
CASES = {
    f"{load}-depth{depth}": (load, depth) for load in ("steady", "pressure", "shared", "swapped") for depth in (1, 2)
}


def _line(plan: StepPlan) -> str:
    """A plan as text. Sampling parameters pass through untouched, `work` and `released` order nothing: left out."""
    fields = asdict(plan)
    del fields["work"], fields["released"]
    for chunk in fields["chunks"]:
        assert chunk.pop("num_drafts") == 0
    fields["decode"] = list(plan.decode)
    fields["joins"] = [
        [join.row, join.id, join.epoch, len(join.tokens), list(join.table), join.start] for join in plan.joins
    ]
    return json.dumps(fields, sort_keys=True)


def _requests(load: str, rng: random.Random) -> list[Request]:
    chain = chain_seed("golden")
    stem = [rng.randrange(100) for _ in range(24)]
    requests: list[Request] = []
    for id in range(40):
        tokens = (stem[: rng.randint(4, 24)] if load == "shared" else []) + [
            rng.randrange(100) for _ in range(rng.randint(1, 20))
        ]
        parent = requests[-1] if load == "shared" and id % 5 == 4 else None
        tokens = list(parent.tokens) if parent else tokens
        requests.append(
            Request(
                id, tokens, SamplingParams(max_tokens=rng.randint(1, 16)), arrival=float(id),
                keys=chain_keys(tokens, 4, chain), chain=chain, parent=parent.id if parent else None,
            )
        )  # fmt: skip
    return requests


def _digest(load: str, depth: int) -> dict[str, object]:
    rng = random.Random(f"{load}{depth}")
    num_blocks = {"steady": 200, "shared": 120}.get(load, 18)
    ledger = KVLedger(num_blocks, 4, host_blocks=12 if load == "swapped" else 0)
    scheduler = Scheduler(ledger, Limits(6, 24, chunk=8, swaps=load == "swapped"), Policy())
    executor = NullExecutor(Capacity(num_blocks, 4, 6))
    arrivals, pending, digest, step = _requests(load, rng), [], hashlib.sha256(), 0
    while arrivals or scheduler.has_work:
        for _ in range(min(len(arrivals), rng.choice((0, 0, 1, 3)))):
            scheduler.add(arrivals.pop(0))
        plan = scheduler.schedule(float(step))
        step += 1
        if plan is not None:
            digest.update(_line(plan).encode() + b"\n")
            executor.submit(plan)
            pending.append(plan)
        if pending and (plan is None or len(pending) >= depth):
            scheduler.commit(pending.pop(0), executor.collect())
        if load != "steady" and step % 11 == 0 and scheduler.state.live:
            scheduler.abort(min(scheduler.state.live))
    return {"plans": scheduler.state.step, "sha256": digest.hexdigest()}


@pytest.mark.parametrize("case", CASES)
def test_plans_are_those_on_record(case: str, request: pytest.FixtureRequest) -> None:
    got = _digest(*CASES[case])
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if request.config.getoption("--record-plans"):
        RECORD.write_text(json.dumps({**record, case: got}, indent=1, sort_keys=True) + "\n")
        return
    assert got == record.get(case), f"{case}: plans changed; if that is meant, record them and say Plan-Change:"
