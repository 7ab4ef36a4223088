"""The executor seam: everything the engine knows about the machine that computes.

An executor runs plans in the order they were submitted, returns one result per plan and takes no
scheduling decision. It reports a bad row in `StepResult.failed`; it raises only when it is itself beyond use.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Late:
    """What a plan needs before it samples and the scheduler does not know: vocabulary masks.

    A mask has one bit per token, lowest bit first; a set bit allows the token. Draft tokens change the shape of a step
    and come with the plan.
    """

    masks: tuple[tuple[int, bytes], ...] = ()  # (row, mask)

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
