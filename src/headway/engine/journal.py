"""What is known here of every open request: enough to let another engine go on with it, token for token.

A token is a pure function of the request, its seed and the tokens before it. So a request goes on exactly if its prompt
and all tokens that reached this side are given to another engine together, and that engine is told where the prompt
ends: penalties, limits, stop tokens and random numbers depend on it. Text and stop strings live further up and notice
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from headway.engine.client import Output, RequestTiming, Submit
from headway.values.params import NO_SLO


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request between submit and its terminal output. `tokens` is what its stream was given, in order."""

    submit: Submit
    began: float  # by the clock of this side
    tokens: list[int] = field(default_factory=list)
    first: float | None = None  # time of its first token
    is_sent: bool = False  # the engine of now has it
    aborting: str | None = None  # the engine was asked to end it, for this reason
    num_resumes: int = 0
    resumed: float = 0.0  # time of the last resume
    num_before: int = 0  # tokens at that time
    num_barren: int = 0  # engines in a row that ended while they held it, before they gave it a token
    hold_s: float = 0.0  # above 0: its engine gives one token and keeps its KV so long, for the engine that goes on
    fetch_from: str = ""  # where the KV is that the next engine may fetch
    fetch_tokens: int = 0  # as in `Submit`
    is_fetched: bool = False  # the engine of now was told where
    num_cached: int | None = None  # prompt tokens that the engine which computed the prompt found in its cache
    let_go: Callable[[], None] | None = None  # tells the engine that keeps its KV that this is not needed any more

    @property
    def is_again(self) -> bool:
        """It goes on after an engine that ended, and the engine of now has given it nothing yet."""
        return self.num_resumes > 0 and len(self.tokens) == self.num_before

    def submission(self) -> Submit:
        """The request for its first engine."""
        submit = self.submit
        if self.fetch_from:
            submit = replace(submit, fetch_from=self.fetch_from, fetch_tokens=self.fetch_tokens)
        if not self.hold_s:
            return submit
        params = submit.params
        first = replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
        return replace(submit, params=first, hold_s=self.hold_s)

    def release(self) -> None:
        """What another engine keeps for it is not needed any more."""
        let_go, self.let_go = self.let_go, None
        if let_go is not None:
            let_go()

    def resubmission(self, now: float) -> Submit:
        """The request for the next engine. No objective ends it: it was accepted, and its clock ran on meanwhile."""
        self.num_resumes += 1
        self.resumed, self.num_before = now, len(self.tokens)
        if not self.tokens:
            return replace(self.submission(), slo=NO_SLO, is_resumed=True)
        submit, fetch_from, self.fetch_from = self.submit, self.fetch_from, ""
        self.is_fetched = bool(fetch_from) and not self.fetch_tokens
        return replace(
            submit,
            tokens=[*submit.tokens, *self.tokens],
            num_prompt=len(submit.tokens),
            parent=None,  # it does not sample from another one's prompt any more
            slo=NO_SLO,
            is_resumed=True,
            fetch_from=fetch_from,
            fetch_tokens=self.fetch_tokens,
        )

    def finish(self, eos_ids: Collection[int]) -> str | None:
        """Why it is complete although no engine said so; None if tokens are missing."""
        params = self.submit.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        if self.tokens and self.tokens[-1] in ends:
            return "stop"
        return "length" if len(self.tokens) >= params.max_tokens else None

    def settle(self, output: Output, now: float) -> Output:
        """The terminal output of a request that was resumed, with the time that it took in all."""
        if self.num_cached is not None:
            output = replace(output, cached_tokens=self.num_cached)
        if not self.num_resumes or output.timing is None:
            return output
        total_s = now - self.began
        first_s = (self.first or now) - self.began
        last, before_s = output.timing, self.resumed - self.began
        prefill_s = min(first_s, before_s) if self.first is not None and self.num_before else 0.0
        timing = RequestTiming(
            queued_s=last.queued_s,
            first_token_s=first_s,
            total_s=total_s,
            prefill_s=last.prefill_s + prefill_s,
            decode_s=last.decode_s,
            preempted_s=max(0.0, total_s - last.queued_s - last.prefill_s - prefill_s - last.decode_s),
            predicted_s=last.predicted_s,
        )
        num_computed = len(self.submit.tokens) + self.num_before if self.num_before and not self.is_fetched else 0
        return replace(
            output,
            timing=timing,
            tokens_recomputed=output.tokens_recomputed + num_computed,
            slo_met=timing.meets(self.submit.slo, output.finish, len(self.tokens)),
        )
