"""Runs cases and prints their claims. By the virtual clock, equal seeds print the same bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headway.bench.policy import slots
from headway.bench.policy.bursts import bursts
from headway.bench.policy.claim import Claim
from headway.bench.policy.declared import declared
from headway.bench.policy.deep import deep
from headway.bench.policy.fairness import fairness
from headway.bench.policy.harm import harm
from headway.bench.policy.impossible import impossible
from headway.bench.policy.itl import itl
from headway.bench.policy.overload import overload
from headway.bench.policy.pauses import pauses
from headway.bench.policy.preemption import preemption
from headway.bench.policy.prefix import prefix
from headway.bench.policy.starvation import starvation
from headway.bench.policy.ttft import ttft
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.setup import ModelSetup

Case = Callable[[int], Iterator[Claim]]

CASES: dict[str, Case] = {
    "fixture": slots.fixtures,
    "slots": slots.ratios,
    "overload": overload,
    "bursts": bursts,
    "pauses": pauses,
    "impossible": impossible,
    "starvation": starvation,
    "fairness": fairness,
    "preemption": preemption,
    "declared": declared,
    "prefix": prefix,
    "harm": harm,
    "itl": itl,
    "ttft": ttft,
    "deep": deep,
}


CLOCKS = ("virtual", "real")


def run(
    cases: Sequence[str] = (),
    seed: int = 0,
    clock: str = "virtual",
    as_json: bool = False,
    *,
    rounds: int = 3,
    setup: ModelSetup | None = None,
) -> int:
    """1 if a claim does not hold. `rounds` and `setup` are of the real clock."""
    if clock not in CLOCKS:
        raise ConfigError(f"clock is {clock!r}; allowed: {', '.join(CLOCKS)}")
    if clock == "virtual" and setup is not None:
        raise ConfigError("a virtual clock computes nothing and takes no model, dtype or kernels; add --clock real")
    known = _virtual(seed) if clock == "virtual" else _live(setup, seed, rounds)
    unknown = [name for name in cases if name not in known]
    if unknown:
        allowed = ", ".join(known)
        raise ConfigError(f"there is no case {unknown[0]!r} by the {clock} clock; there are: {allowed}")
    claims: list[Claim] = []
    for name in cases or known:
        sys.stderr.write(f"{name} ...\n")
        sys.stderr.flush()
        for claim in known[name]():
            claims.append(claim)
            _print(claim)
    failed = [claim for claim in claims if not claim.holds]
    print(f"{len(claims)} claims, {len(failed)} do not hold", flush=True)
    if as_json:
        print(json.dumps({"seed": seed, "clock": clock, "claims": [claim.as_dict() for claim in claims]}))
    return 1 if failed else 0


def _virtual(seed: int) -> dict[str, Callable[[], Iterator[Claim]]]:
    return {name: partial(case, seed) for name, case in CASES.items()}


def _live(setup: ModelSetup | None, seed: int, rounds: int) -> dict[str, Callable[[], Iterator[Claim]]]:
    from headway.bench.policy.live_harm import harm as live_harm
    from headway.bench.policy.live_itl import itl as live_itl  # imports the engine, which takes a moment
    from headway.bench.policy.live_order import order
    from headway.bench.setup import ModelSetup, at_least_one

    at_least_one(rounds=rounds)
    cases = {"order": order, "itl": live_itl, "harm": live_harm}
    return {name: partial(case, setup or ModelSetup(), seed, rounds) for name, case in cases.items()}


def _print(claim: Claim) -> None:
    word = "" if not claim.bar else "holds" if claim.holds else "FAILS"
    print(f"{claim.case:11} {claim.what:75} {claim.value:10.4g}  {claim.bar:16} {word}".rstrip(), flush=True)
