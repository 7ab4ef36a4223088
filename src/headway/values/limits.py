"""What one plan may hold, and the rules by which seats and memory are given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Admission(Enum):
    """How much memory must be there before a request is seated."""

    OPTIMISTIC = "optimistic"  # for its prompt; whoever finds none later is preempted
    PEAK = "peak"  # for the most that all who run will hold together, by what they are expected to write
    RESERVE = "reserve"  # for the longest answer it may get


class Victims(Enum):
    """Whom a preemption takes, within the least urgent class."""

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
