"""Values of an explanation: why a request waited, what ran meanwhile, and what it cost.

Times are seconds since the request arrived. The parts of `Explanation.parts_s` add up to `total_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STEP = "step"  # it came, or was preempted, while a step ran: the next plan had to wait for that
PREFILL, DECODE, PAUSED, REPORT = "prefill", "decode", "paused", "report"


@dataclass(frozen=True, slots=True)
class ReasonNote:
    """How long a wait had one reason."""

    reason: str  # of `WaitReason`, in lower case, or `step`
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the engine did during a wait, as far as its steps are still in the journal."""

    steps: int = 0
    running: float = 0.0  # requests in the batch, the mean
    waiting: float = 0.0  # requests in the queue, the mean
    prompt_tokens: int = 0  # of all prompts, computed
    generated_tokens: int = 0
    admitted: int = 0  # requests
    least_free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WaitNote:
    """One stretch of waiting: before the first admission, or after a preemption."""

    at_s: float
    seconds: float
    reasons: Sequence[ReasonNote] = ()
    meanwhile: Meanwhile = field(default_factory=Meanwhile)


@dataclass(frozen=True, slots=True)
class ChunkNote:
    """Tokens `start` to `start + count` were computed in this step."""

    step: int
    at_s: float
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PreemptionNote:
    """It lost its row, and the KV of so many tokens."""

    step: int
    at_s: float
    reason: str  # memory or priority
    tokens_lost: int
    is_swapped: bool
    waited_s: float = 0.0  # until it was admitted again
    tokens_recomputed: int = 0


@dataclass(frozen=True, slots=True)
class RouteNote:
    """Which replica got it, and what the route thought of each; less is better."""

    replica: str
    why: str
    scores: Mapping[str, float] = field(default_factory=dict)  # by name; empty where nothing was compared


@dataclass(frozen=True, slots=True)
class Explanation:
    """One request, as far as the journal knows it."""

    id: int
    state: str  # waiting, running or done
    total_s: float
    parts_s: Mapping[str, float]
    waits: Sequence[WaitNote] = ()
    chunks: Sequence[ChunkNote] = ()
    num_chunks: int = 0  # the journal keeps the first of them
    preemptions: Sequence[PreemptionNote] = ()
    finish: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_overtaken: int = 0  # later arrivals that were admitted first: the policy's order
    tokens_recomputed: int = 0
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    device_s: float = 0.0  # its share of the steps it was in
    kv_block_s: float = 0.0  # KV blocks times the seconds it held them
    is_resumed: bool = False  # another engine had it first: times are since this one has it
    routed: RouteNote | None = None  # None: there is one engine
