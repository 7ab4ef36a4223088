"""What a text completion says about its prompts, and which of several answers it gives: `echo`, `best_of`, `suffix`.

The log probabilities of a prompt are those of an answer that begins with its first token and is the rest of it: many of
its tokens are computed in a step, and no more logits are kept than those of a few positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import RequestError
from headway.grammar.exactly import exactly
from headway.request_limits import LIMITS
from headway.serve.formats import Echo, FinishedAnswer
from headway.serve.generate import Generation, Prompt
from headway.serve.intent import Intent
from headway.serve.openai import CompletionRequest, TokenEntry
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams

_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
)


@dataclass(frozen=True, slots=True)
class Extras:
    """Of a request for a text completion, what is not about a single answer."""

    has_echo: bool
    is_over: bool  # there is an echo and no answer: max_tokens is 0
    best_of: int
    has_choice: bool  # there are more answers than are given
    suffix: str

    def sampled(self, params: SamplingParams) -> SamplingParams:
        """With the log probabilities by which the best answers are chosen."""
        return replace(params, logprobs=params.logprobs or 0) if self.has_choice else params


def extras_of(asked: CompletionRequest, n: int, most: int) -> Extras:
    """RequestError for what cannot be had together."""
    best_of = n if asked.best_of is None else asked.best_of
    if not n <= best_of <= most:
        raise _wrong(f"best_of is {best_of}; allowed: n ({n}) to {most}", "best_of")
    if best_of > n and asked.stream:
        raise _wrong("best_of above n cannot be streamed: which answers are best is known at their ends", "best_of")
    has_echo, suffix = bool(asked.echo), asked.suffix or ""
    if has_echo and suffix:
        raise _wrong("echo and suffix cannot be had together; leave one of them out", "echo")
    is_over = has_echo and asked.max_tokens == 0
    if is_over and (asked.stream or best_of > n):
        raise _wrong("max_tokens is 0: there is no answer to be streamed or chosen; allowed: 1 or more", "max_tokens")
    return Extras(has_echo, is_over, best_of, best_of > n, suffix)


def infilled(prompt: str | list[int], suffix: str, tokenizer: Tokenizer) -> str:
    """The prompt of a text between two others, for models that know how to."""
    if not isinstance(prompt, str):
        raise _wrong("suffix needs prompts of text; these are token ids", "suffix")
    for before, behind, between in _INFILL:
        if len(tokenizer.added_ids([before, behind, between])) == len(_INFILL[0]):
            return f"{before}{prompt}{behind}{suffix}{between}"
    raise RequestError(
        "suffix is not supported with this model, whose vocabulary has no tokens for text between two others; "
        "leave it out",
        param="suffix",
        code="unsupported_parameter",
    )


def cost_of(prompts: Sequence[Prompt], extras: Extras, num_top: int | None) -> int:
    """Tokens that a request with an echo may come to: those of prompts that are scored, and those of answers."""
    num_prompt = sum(len(prompt.tokens) for prompt in prompts)
    num_scored = 0 if num_top is None else num_prompt
    if extras.is_over:
        return num_scored
    return num_scored + num_prompt + extras.best_of * sum(prompt.params.max_tokens for prompt in prompts)


async def scores_of(
    run: Generation, prompts: Sequence[Sequence[int]], num_top: int | None, *, salt: str, intent: Intent
) -> list[Sequence[TokenEntry] | None]:
    """The log probabilities of each prompt's tokens but the first; none where `num_top` is None."""
    if num_top is None:
        return [None for _ in prompts]
    scored = [_scoring(tokens, num_top) for tokens in prompts if len(tokens) > 1]
    answers: list[FinishedAnswer] = []
    if scored:
        run.submit(scored, n=1, salt=salt, intent=intent)
        answers = await run.whole()
    entries = iter(answer.entries for answer in answers)
    return [next(entries) if len(tokens) > 1 else () for tokens in prompts]


def echo_of(
    entry: str | list[int], tokens: Sequence[int], entries: Sequence[TokenEntry] | None, tokenizer: Tokenizer
) -> Echo:
    """A prompt as text with its log probabilities."""
    text = entry if isinstance(entry, str) else tokenizer.decode(tokens, skip_special=False)
    return Echo(text, tokenizer.token_text(tokens[0]), entries)


def _scoring(tokens: Sequence[int], num_top: int) -> Prompt:
    grammar = exactly(tokens[1:])
    if len(grammar) > LIMITS.grammar_chars:
        raise _wrong(f"echo with logprobs cannot be had of a prompt of {len(tokens)} tokens; send fewer", "echo")
    num_more = len(tokens) - 1
    params = SamplingParams(max_tokens=num_more, temperature=0.0, logprobs=num_top, ignore_eos=True, grammar=grammar)
    return Prompt(tokens[:1], params)


def best(answers: Sequence[FinishedAnswer], best_of: int, n: int, *, has_logprobs: bool) -> list[FinishedAnswer]:
    """Of the answers to each prompt the n that are most likely, per token."""
    chosen: list[FinishedAnswer] = []
    for at in range(0, len(answers), best_of):
        ranked = sorted(answers[at : at + best_of], key=_likelihood, reverse=True)
        chosen += ranked[:n]
    for index, answer in enumerate(chosen):
        answer.index = index
        if not has_logprobs:
            answer.entries = None
    return chosen


def _likelihood(answer: FinishedAnswer) -> float:
    entries = answer.entries or []
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


def _wrong(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
