"""The reasons for which a request waits."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class WaitReason(IntEnum):
    """Of queued requests the reason is the head's: requests behind it wait for what it waits for."""

    SLOTS = 0  # every slot is taken
    TOKENS = 1  # the step's token budget is used up
    BLOCKS = 2  # too few KV blocks are free
    PACING = 3  # one more row would break the latency target
    BARRIER = 4  # static and dynamic batching: the batch has not ended, or is not full
    PREFIX = 5  # a running row computes its prefix
    PAUSED = 6  # its row skips steps


class Waited(NamedTuple):
    """How long a request has waited for one reason."""

    steps: int
    seconds: float
