"""The executor seam: everything the engine knows about the machine that computes.

An executor runs plans in the order they were submitted, returns one result per plan and takes no
scheduling decision. It reports a bad row in `StepResult.failed`; it raises only when it is itself beyond use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
    """What reaches a plan after it was submitted and before it samples: vocabulary masks, drafts."""

    masks: tuple[tuple[int, bytes], ...] = ()
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.masks or self.drafts)


class Executor(Protocol):
    """At most `depth` plans are submitted and not collected."""

    def capacity(self) -> Capacity:
        """Blocks and rows this executor has room for."""

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; never waits for an earlier one to finish."""

    def supply(self, plan_id: int, late: Late) -> None:
        """Hand over what a submitted plan still lacks."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected plan and return what it did."""

    def close(self) -> None:
        """Release threads and memory; idempotent."""
