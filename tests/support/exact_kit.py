"""Answers of an engine with every token and log probability, and what makes speculation guess more than it would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.engine.client import Output, Submit
from headway.engine.engine import Engine
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes
from headway.values.plan import TokenLogprob

Told = dict[int, tuple[list[int], list[TokenLogprob], Output]]
Answers = dict[int, tuple[list[int], list[TokenLogprob], str | None]]


class FreeTokens(VerifyTimes):
    """Draft tokens cost nothing, so that as many as there are guesses are verified."""

    def table(self) -> list[float]:
        return [0.0, *[1.0] * MOST_TOKENS]


class DearTokens(VerifyTimes):
    """Draft tokens gain nothing, and every so often they do: rows go back and forth."""

    def __init__(self) -> None:
        super().__init__()
        self._num_asked = 0

    def table(self) -> list[float]:
        self._num_asked += 1
        return [0.0, *(1.0 + n * (self._num_asked // 3 % 2) for n in range(MOST_TOKENS))]


def run(engine: Engine, submits: Sequence[Submit], between: Callable[[], None] = lambda: None) -> Answers:
    for submit in submits:
        engine.add(submit)
    told = collect(engine, [submit.id for submit in submits], between)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    return {id: (tokens, logprobs, end.finish) for id, (tokens, logprobs, end) in told.items()}


def collect(engine: Engine, ids: Sequence[int], between: Callable[[], None] = lambda: None) -> Told:
    """Step until nothing is left to do; what these requests were told."""
    tokens: dict[int, list[int]] = {id: [] for id in ids}
    logprobs: dict[int, list[TokenLogprob]] = {id: [] for id in ids}
    ends: dict[int, Output] = {}
    while engine.has_work:
        made = engine.step()
        for id, token in zip(made.ids, made.tokens, strict=True):
            tokens[id].append(token)
        for id, entries in made.logprobs.items():
            logprobs[id] += entries
        ends |= {output.id: output for output in made.finished}
        between()
    return {id: (tokens[id], logprobs[id], ends[id]) for id in tokens}
