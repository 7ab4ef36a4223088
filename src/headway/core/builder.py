"""The plan under construction, and the plan in flight.

Between schedule and commit the world moves on: requests are aborted, preempted, or known to end, and their rows go to
others. An `InFlightStep` remembers to which request each token of its plan belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.request import Request
from headway.values.plan import Chunk, Grow, Join, Samples, StepPlan
from headway.values.work import Work


@dataclass(slots=True)
class PlanBuilder:
    """What the next plan holds so far; a row in `placed` was given something and is no victim any more."""

    joins: list[Join] = field(default_factory=list)
    grows: list[Grow] = field(default_factory=list)
    chunks: list[tuple[Chunk, Request]] = field(default_factory=list)
    placed: set[int] = field(default_factory=set)
    short: set[int] = field(default_factory=set)  # rows that wait for memory that leases have
    room: int = 0  # tokens that chunks may still hold
    num_tokens: int = 0  # of all chunks but those with draft tokens
    num_pairs: int = 0
    num_verifying: int = 0  # chunks with draft tokens
    num_drafts: int = 0
    context: int = 0  # tokens whose KV these read

    def add_chunk(self, chunk: Chunk, req: Request) -> None:
        count = chunk.count
        self.chunks.append((chunk, req))
        self.room -= count
        if chunk.samples is Samples.VERIFY:
            self.num_verifying += 1
            self.num_drafts += count - 1
            self.context += chunk.start
            return
        self.num_tokens += count
        self.num_pairs += (2 * chunk.start + count) * count  # `pairs_of`, without a call

    def work(self, decode: int, context: int) -> Work:
        """What it carries so far, beside so many decoding rows with so many tokens of context."""
        decode, context, chunks = decode + self.num_verifying, context + self.context, len(self.chunks)
        return Work(self.num_tokens, self.num_pairs, decode, context, chunks - self.num_verifying, 0, self.num_drafts)


@dataclass(slots=True, eq=False)
class InFlightStep:
    """Tokens of a row in `void` reach no request; those of a row in `ending` reach the request that has left it."""

    plan: StepPlan
    ids: list[int]  # request of each decode row; the same list as last step while no row joins or leaves
    sinks: list[Callable[[int], None]]  # where each decode row's token goes, likewise
    chunks: list[tuple[Chunk, Request]]
    void: set[int] = field(default_factory=set)
    ending: dict[int, Request] = field(default_factory=dict)
    final: list[Request] = field(default_factory=list)  # this plan computes their last token by length
