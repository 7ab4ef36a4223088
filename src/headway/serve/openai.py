"""Requests and responses of the HTTP interface as typed structs: OpenAI's shapes and headway's few extensions.

Decoding is strict: no number from a string, no integer from a float or a boolean. Ranges, the vocabulary and the
context are checked in `validate`; this file knows shapes alone. Null always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

# JSON's integers have no bound; ours fit a machine word, so that arithmetic and messages about them stay small.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(Struct):
    """One part of a message; only `text` parts can be honoured."""

    type: str
    text: str | None = None


class Message(Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer: templates take it or leave it out
    function_call: dict[str, Any] | None = None  # the older form of tool_calls: refused


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: the counts so far on every chunk


class JsonSchemaFormat(Struct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # true: what cannot be honoured to the letter is refused


class ResponseFormat(Struct):
    """The form of an answer as OpenAI has it: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct):
    """The same as vLLM has it: exactly one of these."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingRequest(Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None  # -1: all tokens
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    service_tier: str | None = None
    slo: dict[str, float | None] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: str | None = None


class ChatRequest(SamplingRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Exactly one of `text`, `prompt` (the same under another name) and `messages`."""

    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CacheLookupRequest(TokenizeRequest, kw_only=True):
    """A prompt as /tokenize takes it, or as token ids in `tokens`."""

    tokens: list[Int] | None = None
    cache_salt: str | None = None
    user: str | None = None


class CacheLookupResponse(Struct):
    """What the prefix cache has of a prompt, for its sender; `predicted_ttft_ms` is null while too little is known."""

    prompt_tokens: int
    cached_tokens: int
    predicted_ttft_ms: float | None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[Int]
    model: str | None = None


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(Struct):
    text: str
    prompt: str  # the same, under the name other servers use


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # left out: not known before the end


class ResponseNotes(Struct):
    """What a response has to say about its request."""

    warnings: list[str] | UnsetType = UNSET  # one for each field that was not understood; left out: there was none


class RequestReport(ResponseNotes, kw_only=True):
    """Timings of a request by the engine's clock: queue, prefill, decode and preempted make the total.

    Of several answers: the times of the one that took longest, counts over all, and whether all met the objective.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preempted_ms: float
    total_ms: float
    ttft_ms: float
    predicted_ttft_ms: float | None  # ttft_ms as predicted at arrival; null: not enough is known yet
    preemptions: int
    tokens_recomputed: int
    slo_met: bool | None = None  # null: it had no objective
    device_ms: float = 0.0  # its share of the steps it was in
    kv_block_seconds: float = 0.0  # KV blocks times the seconds it held them


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Struct):
    """One token of an answer with its log probability, chat style."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenEntry]
    refusal: list[TokenEntry] | None = None


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token; offsets count characters from the start of the text.

    The first token of a prompt has no probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(Struct):
    name: str
    arguments: str  # JSON; the beginning of it where the answer was cut off


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    content: str | None  # null: there are calls and no text
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatResponse(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str | UnsetType = UNSET
    headway: RequestReport | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, omit_defaults=True):
    """Of a call first id, type and name, then its arguments piece by piece."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET
    headway: ResponseNotes | UnsetType = UNSET  # on the first chunk, if there are warnings and no report will follow


class ChatUsageChunk(ChatChunk, kw_only=True):
    """Chunks of a stream that was asked for usage: null on all but the last, unless it is wanted continuously."""

    usage: Usage | None = None
    headway: RequestReport | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
    service_tier: str | UnsetType = UNSET
    headway: ResponseNotes | UnsetType = UNSET  # on the first chunk, if there are warnings and no report will follow


class CompletionUsageChunk(CompletionChunk, kw_only=True):
    """A whole completion, or a chunk of a stream that was asked for usage."""

    usage: Usage | None = None
    headway: RequestReport | UnsetType = UNSET


class DefaultSampling(Struct):
    """The values of fields that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int  # or what the context leaves; 16 in text completions unless it was configured


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    default_sampling: DefaultSampling | UnsetType = UNSET  # left out: it makes vectors and samples nothing
    object: Literal["model"] = "model"
    owned_by: str = "headway"
    parent: str | UnsetType = UNSET  # of an adapter: the model it changes


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorBody
