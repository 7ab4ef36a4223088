"""How the outside talks to an engine, wherever it runs: six verbs and a few values.

A client turns one `Submit` into one stream of `Output`s that always ends with exactly one terminal output,
even if the engine dies. Text never passes here: tokens in, tokens out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from headway.engine.explain import Explanation
from headway.values.params import NO_SLO, SamplingParams, Slo
from headway.values.plan import TokenLogprob

T = TypeVar("T")
Settings = dict[str, bool | int | float | str | None]
"""What of an engine may change while it runs, by name."""


@dataclass(frozen=True, slots=True)
class Submit:
    """One request for one answer. The n answers to a prompt are n submits; the later ones name the first."""

    id: int  # unique while alive; chosen by the client
    tokens: Sequence[int]
    params: SamplingParams
    seed: int = 0  # params.seed, or one drawn by the client; equal seeds give equal tokens
    salt: str = ""  # what the request's sender shares blocks with: equal salts
    priority: int = 0  # smaller is sooner
    parent: int | None = None
    tenant: str = ""  # whose share of the service it takes
    lane: str = ""  # the share that requests of its kind have together
    route: str = ""  # requests of one route get answers of similar lengths
    slo: Slo = NO_SLO
    expected: float = 0.0  # output tokens: the median that a ranker predicted; 0: no prediction
    ceiling: float = 0.0  # likewise what nine in ten do not exceed
    namespace: bytes = b""  # opaque; blocks are never shared across namespaces: a tenant's secret, an adapter's digest
    adapter: str = ""  # one of `EngineInfo.adapters`; empty: the model's own weights
    group: int = 0  # answers to one request of a client have the same; 0: it asked for nothing else
    num_prompt: int = 0  # 0: `tokens` is the prompt; else its first so many are, and output that was delivered follows
    is_resumed: bool = False  # was accepted by an engine that has ended: this one takes it, however many wait
    hold_s: float = 0.0  # at its end its KV is kept so long for an engine that goes on with it
    fetch_from: str = ""  # where its KV can be had: `EngineInfo.fetch_at` of another engine
    fetch_tokens: int = 0  # of its first so many tokens, if that is quicker than computing; 0: all of it, in any case
    speculates: bool = True  # its next tokens may be guessed; the tokens are the same


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds a request spent, by the engine's clock: queue, prefill, decode and preempted make the total."""

    queued_s: float = 0.0  # from submit to its first step
    first_token_s: float = 0.0  # from submit to its first token
    total_s: float = 0.0
    prefill_s: float = 0.0  # in a slot, until its first token
    decode_s: float = 0.0  # in a slot, from its first token on
    preempted_s: float = 0.0  # waiting again after a preemption
    predicted_s: float | None = None  # predicted first_token_s at arrival; None: no prediction

    def meets(self, slo: Slo, finish: str | None, num_output: int) -> bool | None:
        """True if a request that ended so met its objectives; None if it has none."""
        if slo == NO_SLO:
            return None
        if finish not in ("stop", "length"):
            return False
        itl_s = (self.total_s - self.first_token_s) / max(1, num_output - 1)
        return (
            (slo.ttft is None or self.first_token_s <= slo.ttft)
            and (slo.itl is None or itl_s <= slo.itl)
            and (slo.deadline is None or self.total_s <= slo.deadline)
        )


# Not frozen: one is made for every stream of a step, in 0.3 us instead of 2.5.
@dataclass(slots=True)
class Output:
    """New tokens of one request; nothing changes it. The last one carries `finish`; an error also carries `error`."""

    id: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()  # one per token if asked for
    finish: str | None = None  # stop, length, abort, shed or error
    error: str | None = None
    code: str | None = None  # set with error if the request was at fault: OpenAI's error code
    param: str | None = None
    cached_tokens: int = 0  # on the terminal output: prompt tokens found in the cache
    timing: RequestTiming | None = None  # on the terminal output
    preemptions: int = 0  # on the terminal output
    tokens_recomputed: int = 0  # on the terminal output: computed again after preemptions
    slo_met: bool | None = None  # on the terminal output, if it had an objective
    device_s: float = 0.0  # on the terminal output: its share of the steps it was in
    kv_block_s: float = 0.0  # on the terminal output: KV blocks times the seconds it held them
    retry_after_s: float | None = None  # with finish shed: rejected by SLO admission; retry after this time


@dataclass(frozen=True, slots=True)
class CacheHit:
    """What the prefix cache has of a prompt, and when its first token would come; None: too little is known."""

    num_prompt: int
    num_cached: int
    predicted_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know about the engine behind it."""

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    eos_ids: Sequence[int] = ()
    dtype: str = ""  # number format of the weights, resolved
    kv_dtype: str = ""  # likewise of the KV cache
    kernels: str = ""  # kernel set and its instruction level
    kernels_fallback: str = ""  # why slower kernels than could be had were taken; empty: they were not
    kernels_digest: str = ""  # of the compiled library; empty: plain torch computes
    source_digest: str = ""  # of headway's own Python files
    debug_kv: bool = False  # every read of the KV cache is checked
    adapters: Mapping[str, str] = field(default_factory=dict)  # digests by name; a request may ask for one of them
    lanes: tuple[str, ...] = ()  # by name, the most urgent first; empty: there are no lanes
    identity: str = ""  # of model and KV layout: engines with the same one have the same keys of blocks
    sliding_window: int = 0  # of a model whose context is cut to it; 0: it is not
    lacks: tuple[str, ...] = ()  # fields of SamplingParams that its backend does not honour
    role: str = "both"  # prefill: makes KV for others to go on with; decode: goes on; both
    fetch_at: str = ""  # address at which other engines fetch KV blocks; empty: they cannot
    speculation: str = "off"  # how tokens are guessed ahead

    def context(self, limit: int) -> str:
        """What keeps a request to `limit` tokens, in words."""
        return f"this model's context is {limit} tokens" + (", its sliding window" * (limit == self.sliding_window))

    def computes_with(self) -> dict[str, str]:
        """What two engines must have in common to give the same answers to the same requests to the same model."""
        names = ("kernels", "kernels_fallback", "kernels_digest", "source_digest", "dtype", "kv_dtype")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since start and gauges of now, as the engine last knew them."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0  # clean and cached-idle: whatever a new request could take
    blocks_cached: int = 0
    live_tokens: int = 0  # tokens of running requests whose KV is present
    preemptions: int = 0
    swaps: int = 0  # preemptions whose KV went to host memory
    preemptions_protected: int = 0  # of requests that had been preempted as often as allowed
    tokens_computed: int = 0
    tokens_generated: int = 0
    tokens_recomputed: int = 0  # of requests that have ended: computed again after preemptions
    tokens_cached: int = 0  # prompt tokens that were not computed because the cache had them
    tokens_from_tier: int = 0  # of those, loaded from host memory or disk
    tokens_from_peers: int = 0  # of those, fetched from other engines
    failed_loads: int = 0  # loads that brought less than was asked for; the rest was computed
    block_copies: int = 0
    steps: int = 0
    drafts: int = 0  # rows of steps that verified draft tokens
    tokens_drafted: int = 0  # draft tokens that steps verified, those that a grammar forces included
    tokens_accepted: int = 0  # of those, the ones that were right
    restarts: int = 0  # engine processes that were replaced; the other counters begin anew with each
    replicas: dict[str, int] = field(default_factory=dict)  # open requests by replica that is up
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    waited: dict[str, float] = field(default_factory=dict)  # seconds of ended requests, by wait reason


class OutputSource(Protocol):
    """Outputs of one request, for one reader. It waits for them, or it listens and takes what is there."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output:
        """Wait for the next one; the terminal one is the last."""

    def listen(self, told: Callable[[], None] | None) -> None:
        """Call `told` when something comes that is not taken yet, and not again before `take`. None: call nothing.

        More of the same step may follow at once: `told` only takes a note.
        """

    def take(self) -> Output | None:
        """All that has come since; None: nothing, or the terminal output was taken."""

    def take_known(self, known: Mapping[int, T | None]) -> T | None:
        """What `known` has for the token that has come, which is taken then; None if it has nothing.

        Nor is anything taken if more than one token has come, or a log probability, or the terminal output.
        """


class EngineClient(Protocol):
    """Safe to call from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine, fixed once it is ready."""

    def submit(self, submit: Submit) -> OutputSource:
        """Start a request. Closing the iterator early aborts it."""

    def abort(self, id: int, reason: str = "abort") -> None:
        """End a request now; its stream still gets a terminal output. Unknown ids are ignored."""

    async def stats(self) -> Stats:
        """Ask the engine for its numbers."""

    async def explain(self, id: int) -> Explanation | None:
        """Why a request waited and what it cost; None if the engine does not know it any more."""

    async def look_up(self, submit: Submit) -> CacheHit:
        """What the prefix cache has of a prompt now; nothing is computed."""

    async def reconfigure(self, changes: Settings) -> Settings:
        """Change settings, all or none, and say what is in force then; ConfigError: they are at fault."""

    async def close(self) -> None:
        """End the engine; every open stream gets a terminal output."""
