"""The executor seam: everything the engine knows about the machine that computes.

An executor runs plans in the order they were submitted, returns one result per plan and takes no
scheduling decision. It reports a bad row in `StepResult.failed`; it raises only when it is itself beyond use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headway.values.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the scheduler may hand out."""

    num_blocks: int
    block_size: int
    num_rows: int
    host_blocks: int = 0
    step_sizes: tuple[int, ...] = ()  # tokens that a step with chunks is padded to, ascending; none: it is not padded
    verifies: bool = False  # it takes draft tokens, and masks for each of them
    verifies_penalized: bool = True  # where it verifies: of rows whose tokens so far change their logits too
    guesses: bool = False  # guesses by what followed before are worth it, so that they are the default
    lacks: tuple[str, ...] = ()  # fields of SamplingParams that it does not honour
    drafts: bool = False  # it guesses draft tokens by itself where a chunk asks for some


@dataclass(frozen=True, slots=True)
class Late:
    """What a plan needs before it samples and the scheduler does not know: vocabulary masks.

    A mask has one bit per token, lowest bit first; a set bit allows the token. Draft tokens change the shape of a step
    and come with the plan; a row with some has a mask for each of its positions.
    """

    masks: tuple[tuple[int, bytes], ...] = ()  # (row, masks of all positions that it samples, end to end)

    def __bool__(self) -> bool:
        return bool(self.masks)


class Executor(Protocol):
    """At most `depth` plans are submitted and not collected."""

    def capacity(self) -> Capacity:
        """Blocks and rows this executor has room for."""

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; never waits for an earlier one to finish."""

    def supply(self, plan_id: int, late: Late) -> None:
        """Hand over what this plan lacks before it samples; an executor may insist on having it before `submit`."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected plan and return what it did."""

    def close(self) -> None:
        """Release threads and memory; idempotent."""


@runtime_checkable
class Prepares(Protocol):
    """An executor that can do ahead what a later step would have to wait for."""

    def prepare(self) -> bool:
        """Do a little of it, while no plan is submitted and not collected; False if nothing is left."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter in the memory of the process, not in use yet."""

    digest: str  # of what it computes
    num_bytes: int
    content: object  # the executor's own


class AdapterMemory(Protocol):
    """The adapters that rows of an executor may name."""

    def read(self, path: str) -> ReadAdapter:
        """Read a directory, on any thread and beside the steps; ConfigError if it cannot be used. Changes nothing."""

    def put(self, name: str, read: ReadAdapter) -> None:
        """Rows that join from now on may name it; ConfigError if there is no room for it any more."""

    def drop(self, name: str) -> None:
        """No row that joins may name it any more."""


@runtime_checkable
class TakesAdapters(Protocol):
    """An executor whose rows may name an adapter; None: these may not."""

    @property
    def adapters(self) -> AdapterMemory | None: ...


@runtime_checkable
class MovesBlocks(Protocol):
    """An executor whose KV blocks can be read and written whole, outside the plans and from any thread.

    The caller knows which: a block is read while nothing writes it, and written while no plan in flight names it.
    """

    def block_layout(self) -> str:
        """How the bytes of a block are to be understood; equal ones can be exchanged."""

    def block_bytes(self) -> int:
        """Bytes of a block, keys and values of all layers."""

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a block's bytes out; `into` has exactly `block_bytes`."""

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        """Copy bytes in: the KV of tokens[start : start + block_size] behind those before them."""
