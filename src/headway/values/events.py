"""What happened, as values. The only source for metrics, logs, traces and calibration.

A sink is outside the core and cannot change a decision. The core has no clock: `now`, in seconds, is what the call
was given that made the event happen. `Queued` bears its request's arrival; `Admitted` and `Preempted` the time of
`schedule`; `FirstToken` and `Stepped` that of `commit`; `Finished` that of either or of `abort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headway.values.states import Waited, WaitReason


@dataclass(slots=True)
class Queued:
    id: int
    now: float
    num_prompt: int


@dataclass(slots=True)
class Admitted:
    id: int
    step: int
    now: float
    num_cached: int  # tokens whose KV was found and not computed
    is_resumed: bool
    is_forked: bool = False  # shares the KV of its leader's prompt
    num_overtaken: int = 0  # later arrivals that were admitted first
    waited: Sequence[tuple[WaitReason, Waited]] = ()  # before its first admission, by reason


class PreemptReason(StrEnum):
    MEMORY = "memory"  # blocks ran out
    PRIORITY = "priority"  # a more urgent request took its slot or blocks


@dataclass(slots=True)
class Preempted:
    id: int
    step: int
    now: float
    num_lost: int  # tokens whose KV was given up; what the cache still has at resume is not computed again
    is_swapped: bool
    reason: PreemptReason
    is_protected: bool = False  # although it had been preempted as often as allowed


@dataclass(slots=True)
class FirstToken:
    id: int
    step: int
    now: float


@dataclass(slots=True)
class Finished:
    id: int
    now: float
    reason: str
    num_prompt: int
    num_output: int
    num_preempted: int
    num_recomputed: int = 0  # tokens computed again after preemptions
    waited: Sequence[tuple[WaitReason, Waited]] = ()  # in all, by reason


@dataclass(slots=True)
class Stepped:
    """One plan was committed."""

    step: int
    now: float
    elapsed: float  # seconds, as the executor measured them
    num_decode: int
    num_chunks: int
    num_computed: int  # tokens the plan computed
    num_pairs: int  # twice the key-query pairs of its chunks
    context: int  # tokens whose KV its decode rows read
    num_generated: int  # tokens that reached requests
    num_copies: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


Event = Queued | Admitted | Preempted | FirstToken | Finished | Stepped


class EventSink(Protocol):
    def emit(self, event: Event) -> None:
        """Must not raise and must not block."""
