"""Beam search: the answers that are likeliest as a whole, where `LLM.generate` chooses token by token.

for answer in beam_search(llm, ["The capital of France is"], width=4, max_tokens=16)[0].outputs:
    print(answer.score, answer.text)

Every step asks the engine for the likeliest next tokens of all beams of all prompts in one batch. A beam's KV is that
of its parent: the blocks they share are found in the prefix cache, and no more than a block's tokens are computed anew.
The candidates, their order and the end of the search are those of transformers' `generate(num_beams=width)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.errors import RequestError
from headway.llm import LLM, Completion, Progress, Prompt, as_list
from headway.request_limits import LIMITS
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """One of the answers to a prompt, the best first."""

    text: str
    token_ids: list[int]
    score: float  # the sum of its tokens' log probabilities, divided by its length ** length_penalty
    finish_reason: str  # stop: it ends with a token that ends answers; length: at max_tokens


@dataclass(frozen=True, slots=True)
class BeamCompletion:
    """A prompt and its best answers."""

    prompt: str | None  # None if the prompt was given as tokens
    prompt_tokens: list[int]
    outputs: list[BeamAnswer]


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of an answer so far, and the sum of their log probabilities."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The search for one prompt: `live` beams grow by a token at a time until none of them can be among the best."""

    width: int
    max_tokens: int
    ends: frozenset[int]  # tokens that end an answer
    length_penalty: float = 1.0
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[tuple[float, Beam]] = field(default_factory=list)  # the `width` best, with their scores

    @property
    def num_wanted(self) -> int:
        """Alternatives per beam that decide: as many beams as may live, and every token that would end one."""
        return self.width + len(self.ends)

    def grow(self, found: Sequence[TokenLogprob]) -> None:
        """One more token: `found[i].top` are the likeliest that may follow `live[i]`."""
        grown = [
            Beam((*beam.tokens, token), beam.total + logprob)
            for beam, entry in zip(self.live, found, strict=True)
            for token, logprob in entry.top
        ]
        grown.sort(key=lambda beam: -beam.total)  # equals stay in the order of their parents
        for beam in grown[: self.width]:
            if self._is_ended(beam):
                self.ended.append((self._score(beam.total, len(beam.tokens)), beam))
        self.ended.sort(key=lambda entry: -entry[0])
        del self.ended[self.width :]
        self.live = [beam for beam in grown if not self._is_ended(beam)][: self.width]
        if len(self.ended) == self.width and self.live:
            # A heuristic, as everywhere: with a penalty above 0 a longer answer might still get the better score.
            best = self._score(self.live[0].total, len(self.live[0].tokens))
            if best <= self.ended[-1][0]:
                self.live = []

    def _is_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self.ends or len(beam.tokens) == self.max_tokens

    def _score(self, total: float, length: int) -> float:
        return total / float(length**self.length_penalty)


def beam_search(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    *,
    width: int = 4,
    max_tokens: int = 16,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
    adapter: str = "",
    on_progress: Progress | None = None,
) -> list[BeamCompletion]:
    """The `width` best answers to every prompt; the same ones each time, alone or beside others.

    A positive `length_penalty` favours long answers, a negative one short ones. `on_progress(done, tokens)` is called
    after every step with the number of prompts that are done and of tokens that were looked at.
    """
    ends = frozenset() if ignore_eos else frozenset(llm.info.eos_ids)
    _check(width, max_tokens, ends)
    texts = as_list(prompts)
    tokens = [llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in texts]
    for ids in tokens:
        if len(ids) + max_tokens > llm.info.max_model_len:
            raise RequestError(
                f"{len(ids)} tokens and max_tokens {max_tokens} are more than the context of {llm.info.max_model_len}; "
                "ask for fewer"
            )
    searches = [BeamSearch(width, max_tokens, ends, length_penalty) for _ in texts]
    params = SamplingParams(
        max_tokens=1, temperature=0, logprobs=searches[0].num_wanted if searches else 0, ignore_eos=True
    )
    num_tokens = 0
    while any(search.live for search in searches):
        asked = [[*ids, *beam.tokens] for ids, search in zip(tokens, searches, strict=True) for beam in search.live]
        found = iter(llm.generate(asked, params, adapter=adapter))
        for search in searches:
            if search.live:
                search.grow([_next(next(found)) for _ in search.live])
        num_tokens += len(asked)
        if on_progress is not None:
            on_progress(sum(not search.live for search in searches), num_tokens)
    return [_completion(llm, *each) for each in zip(texts, tokens, searches, strict=True)]


def _check(width: int, max_tokens: int, ends: frozenset[int]) -> None:
    widest = LIMITS.logprobs - len(ends)
    if not 1 <= width <= widest:
        raise RequestError(
            f"width is {width}; allowed: 1 to {widest} (this model has {len(ends)} tokens that end answers)"
        )
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; allowed: 1 or more")


def _next(completion: Completion) -> TokenLogprob:
    logprobs = completion.outputs[0].logprobs
    assert logprobs is not None  # they were asked for
    return logprobs[0]


def _completion(llm: LLM, prompt: Prompt, tokens: list[int], search: BeamSearch) -> BeamCompletion:
    answers: list[BeamAnswer] = []
    for score, beam in search.ended:
        is_stopped = beam.tokens[-1] in search.ends
        shown = list(beam.tokens[:-1] if is_stopped else beam.tokens)
        answers.append(
            BeamAnswer(llm.tokenizer.decode(shown), list(beam.tokens), score, "stop" if is_stopped else "length")
        )
    return BeamCompletion(prompt if isinstance(prompt, str) else None, tokens, answers)
