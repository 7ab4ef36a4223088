"""What one plan may hold, and the rules of admission and preemption."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Admission(Enum):
    """How much memory must be free before a request is admitted."""

    OPTIMISTIC = "optimistic"  # for its prompt; requests are preempted when memory runs out later
    PEAK = "peak"  # for the peak of all running requests together, at their expected lengths
    RESERVE = "reserve"  # for the longest answer it may get


class Victims(Enum):
    """The victim of a preemption, within the least urgent class."""

    LEAST_RECOMPUTE = "least-recompute"
    LAST_COME = "last-come"


class PrefillOrder(Enum):
    """Which of several prompts under way goes on first."""

    SHORTEST = "shortest"  # the one with the least left; every fourth chunk goes to the oldest
    ARRIVAL = "arrival"


@dataclass(frozen=True, slots=True)
class Limits:
    """Every running row may advance in every step, so tokens >= rows."""

    rows: int
    tokens: int
    chunk: int | None = None  # longest chunk of one row
    spare: int = 0  # blocks an admission must leave free while others run
    swaps: bool = False  # preempt by swapping to host memory where there is room and it is cheaper than recomputing
    partial: int = 4  # prompts that may be under way although the step is full without them
    preemptions: int = 3  # of one request; from then on it is protected, see core/preemption.py
    admission: Admission = Admission.OPTIMISTIC
    victims: Victims = Victims.LEAST_RECOMPUTE
    prefill: PrefillOrder = PrefillOrder.SHORTEST

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.tokens
        assert self.chunk is None or self.chunk >= 1
        assert self.partial >= 1
        assert self.preemptions >= 0
