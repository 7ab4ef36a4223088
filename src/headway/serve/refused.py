"""Fields of OpenAI's and vLLM's interfaces that this server knows and does not decode.

`REFUSED` has those that would change an answer, each with the values that ask for what is done anyway; `SETTLED` all
that is not reported as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


def _is_false(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return value is False or value == []


def _is_true(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return value is True


def _is_never(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return False


def _is_idle_choice(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    # Without tools "auto" and "none" both mean a plain answer; text completions have none.
    return value in ("none", "auto")


def _is_text_only(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return bool(value == ["text"])


def _is_at_most_n(value: Any, fields: Mapping[str, msgspec.Raw]) -> bool:
    n = msgspec.json.decode(fields["n"]) if "n" in fields else 1
    # A wrong n is reported by its own field.
    return type(value) is int and value >= 1 and (type(n) is not int or value <= n)


def _is_blank(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return bool(value == "")


# Field -> whether a given value is what we do anyway.
REFUSED: Mapping[str, Callable[[Any, Mapping[str, msgspec.Raw]], bool]] = {
    "tools": _is_false,
    "tool_choice": _is_idle_choice,
    "functions": _is_false,
    "function_call": _is_idle_choice,
    "echo": _is_false,
    "suffix": _is_blank,
    "best_of": _is_at_most_n,
    "audio": _is_never,
    "modalities": _is_text_only,
    "prediction": _is_never,
    "chat_template": _is_never,
    "chat_template_kwargs": _is_never,
    "continue_final_message": _is_false,
    "web_search_options": _is_never,
    "use_beam_search": _is_false,
    "prompt_logprobs": _is_false,
    "bad_words": _is_false,
    "allowed_token_ids": _is_never,
    "guided_json": _is_never,
    "guided_regex": _is_never,
    "guided_choice": _is_never,
    "guided_grammar": _is_never,
    "skip_special_tokens": _is_true,
    "add_generation_prompt": _is_true,
    "include_stop_str_in_output": _is_false,
    "return_token_ids": _is_false,
    "return_tokens_as_token_ids": _is_false,
}

# Fields of OpenAI's and vLLM's that do not change the text of an answer, and those that `REFUSED` has judged already.
SETTLED = REFUSED.keys() | {
    "store",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "spaces_between_special_tokens",  # which are not shown
}
