"""A step that failed, in parts: which of its rows can be computed without the others.

A row's numbers do not depend on the rows beside it, and computing a token's KV again writes what is there already. So a
step in which something raised is computed again in halves, down to the part that raises by itself; only its rows fail.
This file knows how a plan comes apart, not how it is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headway.values.plan import Chunk, StepPlan


class StepPart(NamedTuple):
    """Rows that are computed together or not at all: one row, and those that sample from its logits."""

    decode: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> list[int]:
        return [*self.decode, *(chunk.row for chunk in self.chunks)]


def parts_of(plan: StepPlan, done: set[int]) -> list[StepPart]:
    """What is left of a plan once these rows are done, in its order."""
    forks: dict[int, list[Chunk]] = {}
    for chunk in plan.chunks:
        if not chunk.count:
            forks.setdefault(chunk.source, []).append(chunk)
    parts = [StepPart((row,), tuple(forks.pop(row, ()))) for row in plan.decode]
    parts += [StepPart((), (chunk, *forks.pop(chunk.row, ()))) for chunk in plan.chunks if chunk.count]
    parts += [StepPart((), tuple(left)) for left in forks.values()]  # their source is not in this plan: they will fail
    return [part for part in parts if not done.intersection(part.rows)]


def plan_of(plan: StepPlan, parts: Sequence[StepPart]) -> StepPlan:
    """A plan that computes these parts; rows have joined, grown and left already."""
    decode = array("i", [row for part in parts for row in part.decode])
    chunks = [chunk for part in parts for chunk in part.chunks]
    return replace(plan, decode=decode, chunks=chunks, joins=(), leaves=(), grows=(), copies=(), released=())


def halves(parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Sequence[StepPart]]:
    """Two of them, neither empty."""
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]
