"""Random scenarios for a scheduler, with everything that may happen to requests at once, at depth 1 to 3.

Adds, forks, aborts, preemptions, drafts, pauses, failing rows, cache resets, swaps, KV that arrives from elsewhere
while plans are in flight, and KV that is held for a peer. Equal seeds give equal scenarios; each ends drained and
checked against the one-at-a-time oracle.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.errors import RequestError
from headway.values.events import Preempted, PreemptReason
from headway.values.limits import Admission, PrefillOrder, Victims
from headway.values.params import NO_SLO, Slo
from headway.values.states import State
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
        is_late=rng.random() < 0.7,
        preemptions=rng.choice([0, 1, 2, 3, 3]),
        admission=rng.choice([Admission.OPTIMISTIC, Admission.OPTIMISTIC, Admission.PEAK, Admission.RESERVE]),
        victims=rng.choice(list(Victims)),
        prefill=rng.choice(list(PrefillOrder)),
    )


def _random_add(rig: Rig, rng: random.Random, stems: list[list[int]]) -> None:
    # Stems of unequal length: prompts share prefixes that end inside blocks as well as at their edges.
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(50) for _ in range(rng.randint(0, 4))]
    fields = {
        "seed": rng.randint(0, 2),
        "stop": rng.choice([(), (), tuple(range(8))]),
        "tenant": rng.choice(["", "", "t"]),
        "needs_feedback": rng.random() < 0.25,
        "lease_s": rng.choice([None, None, None, 3.0, 20.0]),
        **INTENTS[rig.next_id % len(INTENTS)],  # not drawn: what a policy alone looks at must not change the scenario
    }
    state = rng.choice([State.WAITING, State.WAITING, State.LOADING])
    try:
        first = rig.add(prompt, rng.randint(1, 12), state=state, **fields)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            fields["seed"] += 1
            rig.add(prompt, rng.randint(1, 12), parent=first.id, **fields)
    except RequestError:
        assert -(-(len(prompt) + 11) // rig.ledger.block_size) > rig.ledger.pool.num_blocks
    if rng.random() < 0.05:
        rig.executor.fail[rig.next_id - 1] = rng.randint(0, 4)


def _pause_some(policy: Policy, rig: Rig, rng: random.Random) -> None:
    """Whatever the policy says, let it pause running requests by chance."""

    def to_pause(now: float, work: object) -> Collection[Request]:
        return [req for req in rig.scheduler.state.rows.running() if rng.random() < 0.4]

    policy.itl_target, policy.to_pause = lambda: 1.0, to_pause  # type: ignore[method-assign]


def run_scenario(seed: int, policy: Policy | None = None) -> Rig:
    """Play one scenario to its end; AssertionError if any answer differs from the oracle's."""
    rng = random.Random(seed)
    policy = policy or Policy()
    rig = _random_rig(rng, policy)
    if rng.random() < 0.2:
        _pause_some(policy, rig, random.Random(seed))
    stems = [[rng.randrange(50) for _ in range(rng.randint(1, 14))] for _ in range(2)]
    forced = Counter[int]()
    num_forced = 0
    for _ in range(rng.randint(5, 40)):
        roll = rng.random()
        if roll < 0.35:
            _random_add(rig, rng, stems)
        elif roll < 0.42 and rig.accepted:
            rig.abort(rng.choice(list(rig.accepted)))
        elif roll < 0.46 and rig.scheduler.state.rows.running():
            reason = PreemptReason.MEMORY if rng.random() < 0.5 else PreemptReason.PRIORITY
            victim = rng.choice(rig.scheduler.state.rows.running())
            preempt(rig.scheduler.state, victim, reason)
            forced[victim.id] += 1
            num_forced += reason is PreemptReason.MEMORY
        elif roll < 0.48:
            rig.reset_cache()
        else:
            rig.step()
        _change_pace(rig, rng)
        _give_drafts(rig, rng)
        _serve_leases(rig, rng)
    rig.drain()
    rig.verify()
    limits = rig.scheduler.state.limits
    for id, req in rig.accepted.items():
        assert req.num_preempted - forced[id] <= limits.preemptions + 1, (
            f"request {id}: {req.num_preempted} preemptions"
        )
    if limits.admission is Admission.RESERVE or not limits.preemptions:
        num_for_memory = sum(event.reason is PreemptReason.MEMORY for event in rig.log.of(Preempted))
        assert num_for_memory == num_forced, "a request found no memory although it was reserved"
    return rig


def _change_pace(rig: Rig, rng: random.Random) -> None:
    """Some rows stop decoding ahead and wait for their results, others go on without."""
    state = rig.scheduler.state
    for req in state.rows.running():
        roll = rng.random()
        if roll < 0.1 and not req.needs_feedback:
            assert state.rows.await_results(req, state.step) == req.needs_feedback
        elif roll < 0.3 and rig.may_decode_ahead(req):
            req.draft = ()
            state.rows.decode_ahead(req, state.step)


def _give_drafts(rig: Rig, rng: random.Random) -> None:
    for req in rig.scheduler.state.rows.running():
        if req.needs_feedback and len(req.tokens) - req.num_scheduled == 1 and rng.random() < 0.5:
            rest = rig.expected(req.id)[req.num_output :]
            guess = rest[: rng.randint(1, 3)]
            req.draft = tuple(guess if rng.random() < 0.6 else [*guess[:-1], 51])


def _serve_leases(rig: Rig, rng: random.Random) -> None:
    """Peers write what was asked of them, a part at a time, and read what is held for them; some do neither."""
    for id in sorted(rig.scheduler.state.leases):
        req, roll = rig.accepted[id], rng.random()
        if roll < 0.5:
            continue
        if req.state is State.HELD:
            rig.release(id)
        elif roll < 0.7:
            rig.arrive(id, rng.randint(rig.arrived.get(id, 0), req.num_prompt))
        elif roll < 0.75:
            rig.scheduler.loaded(id, 0)
        else:
            rig.load(id, rng.randint(max(1, rig.arrived.get(id, 0)), req.num_prompt))
