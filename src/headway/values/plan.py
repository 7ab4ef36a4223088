"""What one step does: `StepPlan` goes to the executor, `StepResult` comes back.

The plan is columnar and incremental. Joins, leaves, growth and chunks are values, because they *happen*;
rows that merely decode are one `array('i')`, the same object as in the last plan while no row joins or leaves.
This file knows no scheduler and no device: an executor reads it and nothing else of `core`.

Values of which a step makes many (`Join`, `Grow`, `Chunk`, and events) are not frozen, since that costs 0.3 to 1 us
each; nothing writes to them once they are made.

Order inside one plan, which every executor keeps:
    leaves -> copies -> released -> joins -> grows -> forward over decode and chunks -> sample
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from headway.values.params import SamplingParams
from headway.values.work import Work

Ended = TypeVar("Ended")


class Samples(IntEnum):
    """Which positions of a chunk yield tokens."""

    NONE = 0
    TOKEN = 1  # the last position
    VERIFY = 2  # the last known token's position and those of the draft tokens: tokens up to the first wrong guess


class Tier(IntEnum):
    """Where a block lives."""

    DEVICE = 0
    HOST = 1


class BlockRef(NamedTuple):
    tier: Tier
    id: int


class BlockCopy(NamedTuple):
    """Copy a whole block. The copies of a plan run in order, before anything is written."""

    src: BlockRef
    dst: BlockRef


@dataclass(slots=True)
class Join:
    """A request takes a row. Everything the executor will ever need to know about it."""

    row: int
    id: int
    epoch: int
    tokens: Sequence[int]  # prompt and, after a preemption, the output so far
    num_prompt: int  # the first num_prompt tokens are the prompt
    table: Sequence[int]  # block ids, covering at least `start` tokens
    start: int  # tokens whose KV is present
    params: SamplingParams
    seed: int  # random state is a pure function of (seed, position)
    stop_ids: frozenset[int]  # tokens that end this request, once min_tokens are out
    adapter: str = ""  # name of the weights' adapter; empty: none


@dataclass(slots=True)
class Grow:
    """Set `table[index : index + len(blocks)]` of a row: growth at its end, or a copy-on-write swap."""

    row: int
    index: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Chunk:
    """A row that computes other than one token from its own length: prefill, resume, drafts, forks.

    It computes tokens[start : start + count] of the row. With `count` 0 it computes nothing and samples from
    the logits of `source`'s last position in this same plan: that is how n answers share one prompt.
    Draft tokens follow the row's last known token and are part of `count`: `drafts` where the host guessed them,
    `num_drafts` where the device did and holds them itself.
    """

    row: int
    start: int
    count: int
    samples: Samples
    source: int = -1  # -1: the row itself
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Immutable, complete, serializable. No row writes a block that another row reads or writes."""

    id: int
    decode: array[int]  # rows that advance by one token from the executor's own length and last token
    chunks: Sequence[Chunk] = ()
    joins: Sequence[Join] = ()
    leaves: Sequence[int] = ()  # rows given up before this plan runs; a row may leave and be joined anew
    grows: Sequence[Grow] = ()
    copies: Sequence[BlockCopy] = ()
    steps: int = 1  # repeats of the decode part; this scheduler always says 1
    released: Sequence[int] = ()  # device blocks that hold nothing of use after `copies`, unless one of those wrote it
    work: Work = field(default_factory=Work)  # for cost models; follows from the fields above and the rows' lengths

    def sampling_rows(self) -> list[int]:
        """Rows in the order in which a result lists their tokens: decode, then sampling chunks."""
        return [*self.decode, *(chunk.row for chunk in self.chunks if chunk.samples)]


class TokenLogprob(NamedTuple):
    """The sampled token's log probability and the most likely alternatives as (token, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan did. Ragged: a row in `counts` returned that many tokens, every other sampling row one.

    `tokens` follows `StepPlan.sampling_rows()`; a failed row keeps its place with any token.
    """

    plan_id: int
    tokens: Sequence[int]
    counts: Mapping[int, int] = field(default_factory=dict)
    stopped: Sequence[int] = ()  # rows whose newest token is in their own stop set
    failed: Mapping[int, str] = field(default_factory=dict)  # row -> reason; the executor does not raise for a row
    logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)  # row -> one entry per token
    elapsed: float = 0.0


@dataclass(slots=True)
class Emission(Generic[Ended]):
    """What a step emits: parallel columns of new tokens, and what has ended. Commit fills it, clients deliver it."""

    ids: Sequence[int] = ()  # a request that got several tokens is there several times, in order
    tokens: Sequence[int] = ()
    finished: Sequence[Ended] = ()  # requests within the core, their terminal outputs outside
    logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)  # by request, one per token, if asked
    idle_s: float | None = None  # nothing was submitted or collected; without a command nothing happens for so long
