"""What block tables cost one user alone: decode steps over blocks of 16 against one block for the whole request.

One block per request is a contiguous cache: the table has one entry and is never grown, no key is found through a
second block. Everything else, the engine included, is the same. Two engines take turns step by step, so that a slow
moment of the machine meets both; the medians of their steps count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing

from headway.backends.cpu import load_model
from headway.bench.console import print_json, print_table, progress
from headway.bench.offline import WARM_UP, Continuous, OfflineJob
from headway.bench.setup import ModelSetup, at_least_one, describe, submit_of
from headway.bench.workload import WorkItem, chat_mix, fit
from headway.engine.engine import Engine
from headway.engine.garbage import settle_garbage

PROMPT = 64
KINDS = {"paged": False, "contiguous": True}


def run(setup: ModelSetup, *, tokens: int = 256, rounds: int = 3, seed: int = 0, as_json: bool = False) -> int:
    """Print the medians and their ratio; with `as_json` the last line is one object."""
    at_least_one(tokens=tokens, rounds=rounds)
    works = [WorkItem((chat_mix(1, seed)[0].tokens * PROMPT)[:PROMPT], tokens)]
    loaded = load_model(OfflineJob(works, slots=1).config(setup))
    works = fit(works, loaded.spec.vocab_size, loaded.spec.max_len)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack, progress("paging", rounds * tokens) as update:
        engines = {}
        for kind, is_contiguous in KINDS.items():
            one = stack.enter_context(closing(Continuous(OfflineJob(works, 1, is_contiguous).config(setup), loaded)))
            one.answer(WARM_UP, lambda done: None)
            engines[kind] = one.engine
        settle_garbage()
        for round_ in range(rounds):
            _take_turns(engines, works[0], seconds)
            update((round_ + 1) * tokens)
    medians = {kind: statistics.median(values) * 1e3 for kind, values in seconds.items()}
    ratio = medians["paged"] / medians["contiguous"]
    print_table(
        ("cache", "ms per step", "tok/s"),
        [(kind, f"{median:.3f}", 1e3 / median) for kind, median in medians.items()],
        f"one request, {PROMPT} in, {tokens} out, {rounds} times: a paged step takes {ratio:.3f} of a contiguous one",
    )
    if as_json:
        times = {f"{kind}_ms": round(median, 4) for kind, median in medians.items()}
        facts = describe(loaded, OfflineJob(works, slots=1).config(setup))
        print_json({"ratio": round(ratio, 4), "tokens": tokens, "rounds": rounds} | times | facts)
    return 0


def _take_turns(engines: Mapping[str, Engine], work: WorkItem, seconds: dict[str, list[float]]) -> None:
    """One request on each; its prefill does not count."""
    for engine in engines.values():
        engine.add(submit_of(0, work))
        engine.step()
    while any(engine.has_work for engine in engines.values()):
        for kind, engine in engines.items():
            began = time.perf_counter()
            engine.step()
            seconds[kind].append(time.perf_counter() - began)
