"""The rules under which the exactness matrix is run: every policy, pauses, shares over one, and half the memory.

Requests differ in tenant, lane, priority, objectives and expected length, and half of them arrive while the others
run: the later, the shorter and the more urgent. So a policy that reorders or preempts at all does so here. Step costs
are given instead of learned: the order must not depend on the speed of the machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway import plugins
from headway.control.costs import CostModel, CostWeights
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.values.params import SamplingParams, Slo
from headway.values.work import Work

SLOTS = 6
# A row's step costs much, prompts and copies little: preemption pays, and so does swapping.
COSTS = CostWeights(base=1e-2, tokens=1e-5, copies=1e-9)
LANES = ("interactive", "batch")
SHARES = "interactive=80,batch=20"
PATIENCE = 600.0  # seconds; no objective is infeasible, or there would be no answer to compare


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the scheduler, and the effects that must be seen in a cell with other requests."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    has_intents: bool = True  # False: requests are all alike and arrive together
    has_tenants: bool = False  # two of them: caps bind, so that slots go from one to the other
    is_short: bool = False  # the KV pool is half of what the requests need
    reorders: bool = False
    reorders_by_cache: bool = False  # only where prompts are found in the cache
    preempts: bool = False
    pauses: bool = False  # every fourth request has an ITL objective that a step with all rows breaks
    costs: CostWeights = COSTS

    @property
    def swaps(self) -> bool:
        return self.name.endswith("swap")


PLAIN = Rules("fcfs", has_intents=False)
"""The defaults of the engine: every request has a slot."""


def all_rules() -> list[Rules]:
    """Every policy by itself, pauses, shares over one, caps, and three ways to run with half the memory."""
    options = {"mlfq": "quantum=0.0002"}  # by these costs a short prompt is within it and a long one is not
    rules = [
        Rules(
            name,
            {"policy": name, "policy_options": options.get(name, ""), "max_num_seqs": SLOTS},
            reorders=name not in ("fcfs", "lpm"),
            reorders_by_cache=name == "lpm",
            has_tenants=name == "fair",
            preempts=name in ("priority", "slo", "srpt", "mlfq", "fair"),
        )
        for name in plugins.names("policies")
    ]
    shared = {"policy": "sjf", "fair": True, "lanes": SHARES, "max_num_seqs": SLOTS}
    return [
        *rules,
        Rules(
            "slo-pauses",
            {"policy": "slo", "policy_options": "least_itl=0.001", "max_num_seqs": SLOTS},
            reorders=True,
            preempts=True,
            pauses=True,
            costs=COSTS._replace(decode=2e-3),
        ),
        Rules("lanes+fair+sjf", shared, has_tenants=True, reorders=True, preempts=True),
        Rules("caps", {"policy": "fcfs", "max_num_seqs": SLOTS}, has_tenants=True, reorders=True, preempts=True),
        Rules("half-recompute", is_short=True),
        Rules("half-swap", is_short=True),
        Rules("half-peak", {"kv_admission": "peak"}, is_short=True),
    ]


def find_rules(names: str) -> list[Rules]:
    """Those of a list with commas, or all; of fcfs the plain ones. ValueError if there are none of a name."""
    known = {rules.name: rules for rules in all_rules()} | {"fcfs": PLAIN}
    if names == "all":
        return list(known.values())
    wanted = names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"no policy named {name!r}; allowed: all, or some of {', '.join(known)}")
    return [known[name] for name in wanted]


def give_costs(engine: Engine, rules: Rules) -> None:
    """Let every decision be made by the rules' costs; steps are still measured, which changes nothing."""
    costs = CostModel(rules.costs)
    engine.scheduler.state.policy.context.costs = costs
    engine.scheduler.state.costs = costs


def submits(prompts: Sequence[Sequence[int]], max_tokens: int, rules: Rules) -> list[Submit]:
    """One request per prompt, with its place in the list as its id, in order of arrival."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if not rules.has_intents:
        return [Submit(id, prompt, params) for id, prompt in enumerate(prompts)]
    ids = list(range(len(prompts)))
    random.Random(3).shuffle(ids)
    tight = 1.6 * CostModel(rules.costs).step(Work(decode=1))  # feasible, and broken by a step with all rows
    coming = []
    for place, id in enumerate(ids):
        hurry = place / len(ids)  # from 0 to 1
        itl = tight if rules.pauses and place % 4 == 0 else PATIENCE
        objective = Slo(ttft=PATIENCE * 2.0 ** int(4 * (1 - hurry)), itl=itl, deadline=100 * PATIENCE)
        expected = max(1.0, max_tokens * (1 - hurry))
        coming.append(
            Submit(
                id,
                prompts[id],
                params,
                priority=int(3 * (1 - hurry)),
                tenant="bob" if rules.has_tenants and place % 4 == 3 else "ann",
                lane=LANES[hurry < 0.5],
                slo=objective,
                expected=float(max_tokens) if rules.is_short else expected,
                ceiling=float(max_tokens),
            )
        )
    return coming
