"""Runs cases and prints their claims. Standard output is the same to the last byte for equal seeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

from headway.bench.policy import slots
from headway.bench.policy.claim import Claim
from headway.bench.policy.deep import deep
from headway.bench.policy.fairness import fairness
from headway.bench.policy.gaps import gaps
from headway.bench.policy.harm import harm
from headway.bench.policy.overload import overload
from headway.bench.policy.preemption import preemption
from headway.bench.policy.starvation import starvation
from headway.bench.policy.ttft import ttft
from headway.errors import ConfigError

Case = Callable[[int], Iterator[Claim]]

CASES: dict[str, Case] = {
    "fixture": slots.fixtures,
    "seats": slots.ratios,
    "overload": overload,
    "starvation": starvation,
    "fairness": fairness,
    "preemption": preemption,
    "harm": harm,
    "gaps": gaps,
    "ttft": ttft,
    "deep": deep,
}


def run(cases: Sequence[str] = (), seed: int = 0, clock: str = "virtual", as_json: bool = False) -> int:
    """1 if a claim does not hold."""
    if clock != "virtual":
        raise ConfigError(f"clock is {clock!r}; allowed: virtual")
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    claims: list[Claim] = []
    for name in cases or CASES:
        sys.stderr.write(f"{name} ...\n")
        sys.stderr.flush()
        for claim in CASES[name](seed):
            claims.append(claim)
            _print(claim)
    failed = [claim for claim in claims if not claim.holds]
    print(f"{len(claims)} claims, {len(failed)} do not hold", flush=True)
    if as_json:
        print(json.dumps({"seed": seed, "clock": clock, "claims": [claim.as_dict() for claim in claims]}))
    return 1 if failed else 0


def _print(claim: Claim) -> None:
    word = "" if not claim.bar else "holds" if claim.holds else "FAILS"
    print(f"{claim.case:11} {claim.what:75} {claim.value:10.4g}  {claim.bar:16} {word}".rstrip(), flush=True)
