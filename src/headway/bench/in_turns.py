"""Engines that are compared step by step: each makes a step in turn, so that what slows the machine down slows all.

A round of a second is too short to be compared with another one: the speed of a shared machine changes within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.garbage import settle_garbage
from headway.values.params import SamplingParams


class Timed:
    """The answers of one engine to some requests at once; time counts from when each of them has its first token."""

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[tuple[list[int], SamplingParams]],
        salt: str = "",
        adapters: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in jobs]
        self.seconds = 0.0
        self._num_untimed = 0  # tokens that came before time counts
        self._is_timed = False
        self._submits = [
            Submit(id, prompt, params, salt=salt, adapter=adapters[id] if adapters else "")
            for id, (prompt, params) in enumerate(jobs)
        ]

    @property
    def num_timed(self) -> int:
        """Tokens that came while time counted."""
        return sum(map(len, self.tokens)) - self._num_untimed

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def begin(self) -> None:
        """Give the engine its requests; they have the same ids in every run."""
        for submit in self._submits:
            self.engine.add(submit)

    def step(self) -> None:
        """A step of the engine, timed."""
        began = time.perf_counter()
        made = self.engine.step()
        if self._is_timed:
            self.seconds += time.perf_counter() - began
        for id, token in zip(made.ids, made.tokens, strict=True):
            self.tokens[id].append(token)
        if not self._is_timed and all(self.tokens):
            self._is_timed = True
            self._num_untimed = sum(map(len, self.tokens))


def step_in_turns(runs: Sequence[Timed]) -> None:
    """Until every engine has answered."""
    settle_garbage()
    for run in runs:
        run.begin()
    while any(run.has_work for run in runs):
        for run in runs:
            if run.has_work:
                run.step()
