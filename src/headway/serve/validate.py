"""From a typed request to work the engine will take: ranges, vocabulary, context.

Every client error is reported here, before any queue, as a `RequestError` that names the field. This file reads
requests and facts about the model; it does not tokenize and does not submit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.config import ServerConfig
from headway.engine.client import EngineInfo
from headway.errors import RequestError
from headway.request_limits import LIMITS
from headway.serve.openai import ChatRequest, CompletionRequest, Message, SamplingRequest, TokenizeRequest
from headway.serve.service import ServedModel
from headway.text.breakers import DEFAULT_BREAKERS
from headway.text.chat import RenderOptions
from headway.values.params import SamplingParams

COMPLETION_DEFAULT_TOKENS = 16

# Variables of chat templates that requests and models have their own ways to set.
_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
_SALT = re.compile(rf"[A-Za-z0-9_-]{{1,{LIMITS.salt_chars}}}")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for beside its prompt. `max_tokens` None means: the default, as far as there is room."""

    params: SamplingParams  # its max_tokens is settled by `settle` once the prompt's length is known
    max_tokens: int | None
    max_tokens_name: str
    n: int
    salt: str


def context_limit(info: EngineInfo) -> int:
    """Longest prompt plus answer: the model's context, or the KV pool where that is smaller."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def chat_wish(request: ChatRequest, model: ServedModel, server: ServerConfig) -> Wish:
    """Check everything about a chat request that does not need its tokens."""
    if not request.messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        _require_range("top_logprobs", request.top_logprobs, 0, LIMITS.logprobs)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if request.max_completion_tokens is not None:
        return _wish(request, model, server, "max_completion_tokens", request.max_completion_tokens, logprobs)
    return _wish(request, model, server, "max_tokens", request.max_tokens, logprobs)


def completion_wish(request: CompletionRequest, model: ServedModel, server: ServerConfig) -> Wish:
    """Check everything about a text completion that does not need its tokens."""
    if request.logprobs is not None:
        _require_range("logprobs", request.logprobs, 0, LIMITS.logprobs)
    is_over = request.echo and request.max_tokens == 0  # the prompt alone is wanted
    return _wish(request, model, server, "max_tokens", 1 if is_over else request.max_tokens, request.logprobs)


def settle(wish: Wish, num_prompt: int, info: EngineInfo, *, param: str, default: int) -> SamplingParams:
    """Fit the answer behind a prompt of `num_prompt` tokens; `param` names the field the prompt came in."""
    limit = context_limit(info)
    if num_prompt >= limit:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; {info.context(limit)}, prompt and answer together; "
            "shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    room = limit - num_prompt
    if wish.max_tokens is not None and wish.max_tokens > room:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and {wish.max_tokens_name} is {wish.max_tokens}, "
            f"{num_prompt + wish.max_tokens} in all; {info.context(limit)}; "
            f"ask for at most {room}",
            param=wish.max_tokens_name,
            code="context_length_exceeded",
        )
    wanted = wish.max_tokens if wish.max_tokens is not None else min(room, default)
    wanted = max(wanted, min(room, wish.params.min_tokens))
    return replace(wish.params, max_tokens=wanted)


def check_tokens(tokens: Sequence[int], info: EngineInfo, *, param: str) -> None:
    """Token ids from outside must be in the vocabulary."""
    if not tokens:
        raise RequestError(f"{param} has no tokens; give at least one", param=param)
    if min(tokens) < 0 or max(tokens) >= info.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < info.vocab_size)
        raise RequestError(f"{param} has token id {wrong}; allowed: 0 to {info.vocab_size - 1}", param=param)


def check_salt(salt: str | None) -> None:
    if salt is not None and not _SALT.fullmatch(salt):
        raise RequestError(f"cache_salt takes 1 to {LIMITS.salt_chars} letters, digits, - and _", param="cache_salt")


def require_few(tokens: Sequence[int], info: EngineInfo, *, param: str) -> None:
    """No more tokens than a context holds, where they are no prompt."""
    if len(tokens) > context_limit(info):
        raise RequestError(
            f"{param} has {len(tokens)} tokens; {info.context(context_limit(info))}; send fewer",
            param=param,
            code="context_length_exceeded",
        )


def too_long(num_chars: int, info: EngineInfo, *, param: str) -> RequestError:
    """Of a text that was not tokenized to its end."""
    limit = context_limit(info)
    return RequestError(
        f"the prompt has {num_chars} characters, which are more than {limit} tokens; {info.context(limit)}, prompt and "
        "answer together; shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def require_short(num_chars: int, model: ServedModel, *, param: str) -> None:
    """Refuse texts that no prompt of this model can hold, before they are rendered or tokenized."""
    limit = context_limit(model.client.info)
    if num_chars > limit * model.tokenizer.longest_token:
        raise too_long(num_chars, model.client.info, param=param)


def prompts_of(request: CompletionRequest, server: ServerConfig, info: EngineInfo) -> list[str] | list[list[int]]:
    """The prompts of a text completion, whichever of the four shapes they came in."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [_filled(prompt)]
    if not prompt:
        raise RequestError("prompt is empty; give text or token ids", param="prompt")
    if isinstance(prompt[0], int) and len(prompt) >= context_limit(info):
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; {info.context(context_limit(info))}, prompt and answer together; "
            "shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if all(isinstance(entry, int) for entry in prompt):
        return [[entry for entry in prompt if isinstance(entry, int)]]
    if len(prompt) > server.max_prompts:
        raise RequestError(f"prompt has {len(prompt)} entries; allowed: up to {server.max_prompts}", param="prompt")
    texts = [entry for entry in prompt if isinstance(entry, str)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise RequestError("prompt mixes text and token ids; give one kind", param="prompt")
    return [_filled(text) for text in texts] if texts else lists


def template_messages(messages: Sequence[Message], *, param: str = "messages") -> list[dict[str, Any]]:
    """Messages as chat templates expect them; parts that are not text are refused."""
    return [_template_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]


def render_options(asked: ChatRequest | TokenizeRequest) -> RenderOptions:
    """What the chat template is told beside messages and tools."""
    names = asked.chat_template_kwargs or {}
    taken = next((name for name in names if name in _TEMPLATE_NAMES), None)
    if taken is not None:
        where = f"chat_template_kwargs.{taken}"
        said = f"{where} is a field of the request or of the model; allowed: other variables of the chat template"
        raise RequestError(said, param=where, code="invalid_value")
    is_continued = asked.continue_final_message is True
    if is_continued and asked.add_generation_prompt:
        raise RequestError(
            "give add_generation_prompt or continue_final_message, not both: an answer cannot begin anew and go on",
            param="continue_final_message",
        )
    return RenderOptions(asked.add_generation_prompt is not False, is_continued, names)


def check_model(asked: str | None, served: str) -> None:
    """Only the served model is there; no name means that one."""
    if asked is not None and asked != served:
        raise RequestError(
            f"the model {asked[:128]!r} does not exist here; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


def _wish(
    request: SamplingRequest,
    model: ServedModel,
    server: ServerConfig,
    name: str,
    max_tokens: int | None,
    logprobs: int | None,
) -> Wish:
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{name} is {max_tokens}; allowed: 1 or more", param=name)
    n = 1 if request.n is None else request.n
    _require_range("n", n, 1, server.max_n)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    check_salt(request.cache_salt)
    info = model.client.info
    # Until the prompt's length is known the bound is the widest there can be.
    bound = max_tokens if max_tokens is not None else context_limit(info)
    given = {
        "temperature": request.temperature,
        "top_k": 0 if request.top_k == -1 else request.top_k,  # other servers write "off" as -1
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "seed": request.seed,
        "xtc_probability": request.xtc_probability,
        "xtc_threshold": request.xtc_threshold,
        **_dry(request),
    }
    params = SamplingParams(
        logprobs=logprobs,
        stop=stops_of(request.stop, param="stop"),
        stop_token_ids=_stop_tokens(request.stop_token_ids, info),
        logit_bias=_logit_bias(request.logit_bias, info),
        **model.defaults.fill({**given, "max_tokens": bound}),
    )
    return Wish(params, max_tokens, name, n, request.cache_salt or "")


def breakers_of(given: list[str] | None) -> tuple[str, ...]:
    """The strings at which a repeat ends."""
    name, breakers = "dry_sequence_breakers", DEFAULT_BREAKERS if given is None else tuple(dict.fromkeys(given))
    if len(breakers) > LIMITS.stops or any(not 1 <= len(text) <= LIMITS.stop_chars for text in breakers):
        allowed = f"up to {LIMITS.stops} strings of 1 to {LIMITS.stop_chars} characters"
        raise RequestError(f"{name} is {given!r:.200}; allowed: {allowed}", param=name)
    return breakers


def _dry(request: SamplingRequest) -> dict[str, Any]:
    """The fields of DRY as llama.cpp names them, but for its breakers, which take a look into the vocabulary."""
    last = request.dry_penalty_last_n
    if last is not None and (not -1 <= last < 2**31 or last == 0):
        allowed = f"dry_penalty_last_n is {last}; allowed: -1 (all), or 1 to {2**31 - 1}"
        raise RequestError(allowed, param="dry_penalty_last_n")
    return {
        "dry_multiplier": request.dry_multiplier,
        "dry_base": request.dry_base,
        "dry_allowed_length": request.dry_allowed_length,
        "dry_range": None if last is None else max(last, 0),
    }


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; allowed: {low} to {high}", param=name)


def stops_of(stop: str | list[str] | None, *, param: str) -> tuple[str, ...]:
    """Strings or expressions that end an answer, whether one or several came."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > LIMITS.stops:
        raise RequestError(f"{param} has {len(stops)} strings; allowed: up to {LIMITS.stops}", param=param)
    for text in stops:
        if not 1 <= len(text) <= LIMITS.stop_chars:
            allowed = f"1 to {LIMITS.stop_chars} characters each"
            raise RequestError(f"{param} has a string of {len(text)} characters; allowed: {allowed}", param=param)
    return stops


def _stop_tokens(tokens: list[int] | None, info: EngineInfo) -> tuple[int, ...]:
    if not tokens:
        return ()
    if len(tokens) > LIMITS.stop_token_ids:
        message = f"stop_token_ids has {len(tokens)} entries; allowed: up to {LIMITS.stop_token_ids}"
        raise RequestError(message, param="stop_token_ids")
    check_tokens(tokens, info, param="stop_token_ids")
    return tuple(tokens)


def _logit_bias(bias: Mapping[str, float] | None, info: EngineInfo) -> dict[int, float]:
    if bias and len(bias) > LIMITS.logit_bias:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; allowed: up to {LIMITS.logit_bias}", param="logit_bias"
        )
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_number or int(key) >= info.vocab_size:
            allowed = f"token ids from 0 to {info.vocab_size - 1}"
            raise RequestError(f"logit_bias has the key {key[:32]!r}; allowed: {allowed}", param="logit_bias")
        result[int(key)] = value
    return result


def _filled(text: str) -> str:
    if not text:
        raise RequestError("prompt is empty; give text or token ids", param="prompt")
    return text


def _template_message(message: Message, where: str) -> dict[str, Any]:
    if message.function_call is not None:
        raise RequestError(
            f"{where}.function_call is not supported; write the call as an entry of tool_calls",
            param=f"{where}.function_call",
            code="unsupported_tool_message",
        )
    content = message.content
    if isinstance(content, list):
        content = _joined(message, where)
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise RequestError(f"{where} has no content", param=f"{where}.content")
        content = ""
    result: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    return result


def _joined(message: Message, where: str) -> str:
    assert isinstance(message.content, list)
    texts: list[str] = []
    for index, part in enumerate(message.content):
        at = f"{where}.content[{index}]"
        if part.type != "text":
            raise RequestError(
                f"{at} is of type {part.type[:32]!r}; allowed: text", param=at, code="unsupported_content_part"
            )
        if part.text is None:
            raise RequestError(f"{at} has no text", param=f"{at}.text")
        texts.append(part.text)
    if not texts:
        raise RequestError(f"{where} has no content", param=f"{where}.content")
    return "".join(texts)
