"""`scripts/fuzz`: random scenarios through the scheduler under every policy; no wrong token, no block left behind.

A scenario is its seed: it chooses the policy, the limits, and what happens to requests. KV cells hash the whole prefix,
so a wrong table, a lost copy or a block that was given out too early changes every later token; each answer is compared
with that of the request alone. A failing seed is printed with the command that runs it again. Exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests")]

from conformance import Make, variants  # noqa: E402
from headway import plugins  # noqa: E402
from headway.values.events import Admitted, Preempted  # noqa: E402
from headway.values.plan import Samples  # noqa: E402
from headway.values.states import WaitReason  # noqa: E402
from rig import Rig  # noqa: E402
from scenario import run_scenario  # noqa: E402

MUST_HAPPEN = ("preemptions", "swapped out", "forks", "chunks with drafts", "loads", "paused requests")


def choices(names: Sequence[str]) -> list[tuple[str, Make]]:
    """Every policy, by itself and within shares."""
    return [choice for name in names for choice in variants(name).items()]


def seen(rig: Rig) -> Iterator[str]:
    """Counts what happened in a scenario: shows that the scenarios cover these cases."""
    for event in rig.log.events:
        if isinstance(event, Preempted):
            yield "preemptions"
            if event.is_swapped:
                yield "swapped out"
            if event.is_protected:
                yield "of protected requests"
        elif isinstance(event, Admitted) and event.is_forked:
            yield "forks"
    for plan in rig.plans:
        yield from ("chunks with drafts" for chunk in plan.chunks if chunk.samples is Samples.VERIFY)
    yield from ("steps" for _ in rig.plans)
    yield from ("requests" for _ in rig.accepted)
    yield from ("loads" for _ in rig.arrived)
    yield from ("paused requests" for req in rig.accepted.values() if WaitReason.PAUSED in req.waited)
    yield from (f"ends by {finish.value}" for finish in rig.outcomes.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scenarios", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; the others count up")
    parser.add_argument("--policies", default="all", help="names separated by commas")
    wanted = parser.parse_args(arguments)
    names = plugins.names("policies") if wanted.policies == "all" else wanted.policies.split(",")
    made, counts, failed, began = choices(names), Counter[str](), [], time.monotonic()
    for seed in range(wanted.seed, wanted.seed + wanted.scenarios):
        name, make = made[seed % len(made)]
        try:
            counts.update(seen(run_scenario(seed, make())))
        except Exception as error:
            failed.append(seed)
            again = f"scripts/fuzz --seed {seed} --scenarios 1 --policies {wanted.policies}"
            print(f"seed {seed} ({name}): {type(error).__name__} {str(error).splitlines()[:1]}; {again}", flush=True)
        if (seed - wanted.seed + 1) % 1000 == 0:
            print(f"{seed - wanted.seed + 1} scenarios, {time.monotonic() - began:.0f} s", flush=True)
    print(", ".join(f"{counts[what]:,} {what}" for what in sorted(counts)))
    print(f"{len(failed)} of {wanted.scenarios} scenarios failed under {len(made)} policies", flush=True)
    unseen = [what for what in MUST_HAPPEN if not counts[what]] if wanted.scenarios >= 1000 else []
    if unseen:
        print(f"never happened: {', '.join(unseen)}; the scenarios do not test what they should", flush=True)
    return 1 if failed or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
