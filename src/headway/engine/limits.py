"""The engine's part of the table of limits: what a front end forgot to check does not reach the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine.client import EngineInfo, Submit
from headway.errors import RequestError
from headway.grammar.exactly import is_exact
from headway.request_limits import LIMITS


def require_valid(submit: Submit, info: EngineInfo, *, takes_grammars: bool) -> None:
    """RequestError for what an engine of these facts cannot take."""
    require_limits(submit, info.lacks, info.kernels)
    num_prompt, limit = submit.num_prompt or len(submit.tokens), info.max_model_len
    if not num_prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if not 0 <= len(submit.tokens) - num_prompt < submit.params.max_tokens:
        raise RequestError(
            f"num_prompt is {num_prompt} of {len(submit.tokens)} tokens; allowed: up to all of them, with fewer "
            f"than max_tokens ({submit.params.max_tokens}) behind them",
            param="num_prompt",
        )
    if num_prompt + submit.params.max_tokens > limit:
        raise RequestError(
            f"{info.context(limit)}; the prompt has {num_prompt} and max_tokens is "
            f"{submit.params.max_tokens}, together {num_prompt + submit.params.max_tokens}: shorten either",
            param="max_tokens" if num_prompt < limit else "prompt",
            code="context_length_exceeded",
        )
    pool = info.num_blocks * info.block_size
    if num_prompt + submit.params.max_tokens - 1 > pool:  # an answer's last token is not computed
        raise RequestError(
            f"prompt ({num_prompt}) plus max_tokens ({submit.params.max_tokens}) needs more than the {pool} tokens of "
            "the KV cache; ask for fewer tokens or give the server more KV memory",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if submit.adapter and submit.adapter not in info.adapters:
        allowed = ", ".join(info.adapters) or "none: no adapter is loaded"
        raise RequestError(f"adapter is {submit.adapter!r}; allowed: {allowed}", param="adapter")
    if submit.params.grammar and not takes_grammars:
        raise RequestError("this engine takes no grammar; leave it out", param="grammar")
    vocab = info.vocab_size
    for name, ids in (
        ("prompt", submit.tokens),
        ("logit_bias", submit.params.logit_bias),
        ("stop_token_ids", submit.params.stop_token_ids),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            raise RequestError(f"{name} has a token id outside 0 to {vocab - 1}", param=name)


def require_limits(submit: Submit, lacks: Sequence[str] = (), backend: str = "") -> None:
    """RequestError, with the field's name, for the first number beyond its limit, or field that the executor lacks."""
    params = submit.params
    for name in lacks:
        if getattr(params, name):
            raise RequestError(
                f"{name} is {getattr(params, name)!r}, which this engine's backend ({backend}) does not honour; leave "
                "it out",
                param=name,
            )
    for name, got, most, what in (
        ("stop", len(params.stops), LIMITS.stops, "strings"),
        ("stop", max(map(len, params.stops), default=0), LIMITS.stop_chars, "characters in a string"),
        ("stop_token_ids", len(params.stop_token_ids), LIMITS.stop_token_ids, "entries"),
        ("logit_bias", len(params.logit_bias), LIMITS.logit_bias, "entries"),
        ("logprobs", params.logprobs or 0, LIMITS.logprobs, "tokens"),
        ("grammar", len(params.grammar), LIMITS.grammar_chars, "characters"),
        ("cache_salt", len(submit.salt), LIMITS.salt_chars, "characters"),
        ("user", len(submit.tenant), LIMITS.tenant_chars, "characters"),
        ("priority", abs(submit.priority), LIMITS.priority, "either way"),
    ):
        if got > most:
            raise RequestError(f"{name} has {got} {what}; allowed: up to {most}", param=name)
    if params.grammar and not is_exact(
        params.grammar
    ):  # it says when an answer is complete, and nothing but the end may follow
        for name, value in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens)):
            if value:
                raise RequestError(
                    f"{name} is {value}, which no answer held to a grammar can be; leave it out", param=name
                )
