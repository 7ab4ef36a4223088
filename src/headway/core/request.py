"""A request. Its states and moves are in `values/states.py`, drawn in docs/architecture.md.

`Request` is the record that the parts of the core share, and only they write to it once it is added, but for `draft`,
which an engine proposes; policies and executors read. The ledger alone writes `table`, `host_table` and `published`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.values.params import NO_SLO, SamplingParams, Slo
from headway.values.states import TRANSITIONS, Finish, Moment, State, Waited, WaitReason


class Account(NamedTuple):
    """The lane and tenant that the service of a request is charged to."""

    lane: str
    tenant: str


@dataclass(slots=True, eq=False)
class Request:
    """0 <= num_computed <= num_scheduled <= len(tokens) + drafts; `epoch` counts the rows it gave up."""

    id: int
    tokens: list[int]  # the prompt, then the output as it is committed
    params: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    priority: int = 0  # smaller is sooner
    tenant: str = ""
    lane: str = ""  # a share of the engine's service that requests of one kind have together
    route: str = ""
    slo: Slo = NO_SLO
    expected: float = 0.0  # output tokens: the predicted median; 0: no prediction
    ceiling: float = 0.0  # output tokens: a predicted upper quantile; 0: no prediction
    keys: Sequence[bytes] = ()  # chain keys of the prompt's full blocks, made by the caller of add
    chain: bytes = b""  # seed of the key chain, to go on with it over the output; blocks are shared only where equal
    adapter: str = ""  # name of the weights' adapter; empty: none
    group: int = 0  # requests that were one request outside have the same; 0: it was one of its own
    parent: int | None = None  # id of the request whose prompt this one shares (n > 1)
    needs_feedback: bool = False  # not scheduled while a result of it is in flight
    lease_s: float | None = None  # at its end keep the blocks this long for a peer (state HELD)

    num_prompt: int = 0  # 0: all its tokens are the prompt; else those behind it are output that another engine made
    state: State = State.WAITING
    epoch: int = 0
    row: int = -1
    table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # host blocks of its KV while it is swapped out
    num_computed: int = 0  # tokens whose KV is present; of a decoding row, as of its first decode step
    num_scheduled: int = 0  # tokens whose KV is present or in flight, likewise
    published: int = 0  # leading blocks of the table that are in the prefix index
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_preempted: int = 0
    lost: int = 0  # computed tokens at its last preemption
    num_recomputed: int = 0  # tokens computed again after preemptions
    is_reserved: bool = False  # every block it can ever need is in its table or reserved
    num_reserved: int = 0  # blocks reserved for it beyond its table
    draft: tuple[int, ...] = ()
    num_drafts: int = 0  # draft tokens that the device holds for its next chunk
    number: int | None = None  # of its arrival; -1 once it has left the queue
    num_overtaken: int = 0  # later arrivals that were admitted before it
    queued: Moment | None = None  # since when it waits
    latest_start: float = math.inf  # as the policy said when it was queued
    waited: dict[WaitReason, Waited] = field(default_factory=dict)
    finish: Finish | None = None
    error: str | None = None
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.tokens)
        self.account = Account(self.lane, self.tenant)
        self.tokens.append(0)  # makes room for output: to move a long list in a step takes 10 to 80 us, with new pages
        self.tokens.pop()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_computed(self) -> int:
        """Tokens whose KV it can ever need: the last token is sampled and never computed."""
        return self.num_prompt + self.params.max_tokens - 1

    @property
    def likely_output(self) -> float:
        """Expected output tokens in all, at least one more than it has."""
        expected = self.expected if self.expected > 0 else float(self.params.max_tokens)
        return min(max(expected, self.num_output + 1.0), float(self.params.max_tokens))

    @property
    def wants_next(self) -> bool:
        """True of a row that waits for its results, once they are in: it wants one token, as decoding rows do."""
        return self.needs_feedback and self.num_output > 0 and len(self.tokens) == self.num_scheduled + 1

    def shares_prompt(self, other: Request) -> bool:
        """True if the KV of one's known tokens serves the other."""
        return (self.chain, self.adapter, self.tokens) == (other.chain, other.adapter, other.tokens)

    def move(self, to: State) -> None:
        """Change state along the table; anything else is a bug of ours."""
        if to not in TRANSITIONS[self.state]:
            raise AssertionError(f"request {self.id}: {self.state.value} -> {to.value} is not in the table")
        self.state = to
