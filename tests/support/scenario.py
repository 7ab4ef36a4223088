"""Random scenarios for a scheduler: adds, forks, aborts, preemptions, drafts, cache resets, at depth 1 to 3.

Equal seeds give equal scenarios; each ends drained and checked against the one-at-a-time oracle.
"""

from __future__ import annotations

import random
from typing import Any

from headway.core.policy import Policy
from headway.core.preempt import preempt
from headway.errors import RequestError
from headway.values.params import NO_SLO, Slo
from rig import Rig

INTENTS: tuple[dict[str, Any], ...] = (
    {"priority": 0, "lane": "fast", "slo": Slo(ttft=9.0), "expected": 2.0},
    {"priority": 2, "lane": "slow", "slo": NO_SLO, "expected": 0.0},
    {"priority": 1, "lane": "fast", "slo": Slo(ttft=60.0, itl=2.0, deadline=90.0), "expected": 9.0},
    {"priority": 1, "lane": "slow", "slo": Slo(deadline=40.0), "expected": 4.0},
    {"priority": 0, "lane": "", "slo": NO_SLO, "expected": 12.0},
)


def _random_rig(rng: random.Random, policy: Policy | None) -> Rig:
    block_size = rng.choice([1, 2, 3, 4])
    rows = rng.randint(1, 5)
    return Rig(
        num_blocks=rng.randint(6, 24),
        block_size=block_size,
        rows=rows,
        tokens=rng.randint(rows, 24),
        chunk=rng.choice([None, 1, 3, 5]),
        depth=rng.randint(1, 3),
        host_blocks=rng.choice([0, 0, 8]),
        caching=rng.random() < 0.8,
        spare=rng.choice([0, 0, 1]),
        policy=policy,
    )


def _random_add(rig: Rig, rng: random.Random, stems: list[list[int]]) -> None:
    # Stems of unequal length: prompts share prefixes that end inside blocks as well as at their edges.
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(50) for _ in range(rng.randint(0, 4))]
    fields = {
        "seed": rng.randint(0, 2),
        "stop": rng.choice([(), (), tuple(range(8))]),
        "tenant": rng.choice(["", "", "t"]),
        "needs_feedback": rng.random() < 0.15,
        **INTENTS[rig.next_id % len(INTENTS)],  # not drawn: what a policy alone looks at must not change the scenario
    }
    try:
        first = rig.add(prompt, rng.randint(1, 12), **fields)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            fields["seed"] += 1
            rig.add(prompt, rng.randint(1, 12), parent=first.id, **fields)
    except RequestError:
        assert -(-(len(prompt) + 11) // rig.ledger.block_size) > rig.ledger.pool.num_blocks


def run_scenario(seed: int, policy: Policy | None = None) -> Rig:
    """Play one scenario to its end; AssertionError if any answer differs from the oracle's."""
    rng = random.Random(seed)
    rig = _random_rig(rng, policy)
    stems = [[rng.randrange(50) for _ in range(rng.randint(1, 14))] for _ in range(2)]
    for _ in range(rng.randint(5, 40)):
        roll = rng.random()
        if roll < 0.35:
            _random_add(rig, rng, stems)
        elif roll < 0.42 and rig.accepted:
            rig.abort(rng.choice(list(rig.accepted)))
        elif roll < 0.46 and rig.scheduler.state.rows.running():
            preempt(rig.scheduler.state, rng.choice(rig.scheduler.state.rows.running()))
        elif roll < 0.48:
            rig.ledger.reset_cache()
        elif roll < 0.52:
            _give_drafts(rig, rng)
        else:
            rig.step()
    rig.drain()
    rig.verify()
    return rig


def _give_drafts(rig: Rig, rng: random.Random) -> None:
    for req in rig.scheduler.state.rows.running():
        if req.needs_feedback and len(req.tokens) - req.planned == 1:
            rest = rig.expected(req.id)[req.num_output :]
            guess = rest[: rng.randint(1, 3)]
            req.draft = tuple(guess if rng.random() < 0.6 else [*guess[:-1], 51])
