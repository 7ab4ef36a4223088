"""litellm, by its `hosted_vllm` and `openai` providers: chat and text, plain and streamed."""

from __future__ import annotations

from typing import Any

import litellm
from report import BEGINNING, QUESTION, check_answer, say_version, target

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def counts(usage: Any) -> tuple[int, int, int] | None:
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def chat(what: str, ask: dict[str, Any]) -> None:
    answer = litellm.completion(**ask)
    choice = answer.choices[0]
    check_answer(what, QUESTION, choice.message.content, choice.finish_reason, counts(answer.usage))
    text, finish, usage = "", None, None
    for chunk in litellm.completion(**ask, **STREAMED):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = getattr(chunk, "usage", None) or usage
    check_answer(f"{what}, streamed", QUESTION, text, finish, counts(usage))


def completions(what: str, ask: dict[str, Any]) -> None:
    answer = litellm.text_completion(**ask)
    choice = answer.choices[0]
    check_answer(what, BEGINNING, choice.text, choice.finish_reason, counts(answer.usage))
    text, finish, usage = "", None, None
    for chunk in litellm.text_completion(**ask, **STREAMED):
        for choice in chunk.choices:
            text += choice.text or ""
            finish = choice.finish_reason or finish
        usage = getattr(chunk, "usage", None) or usage
    check_answer(f"{what}, streamed", BEGINNING, text, finish, counts(usage))


def main() -> None:
    server = target()
    say_version("litellm")
    where = {"api_base": server.base_url, "api_key": "any", "timeout": 60, "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    for provider in ("hosted_vllm", "openai"):
        name = {"model": f"{provider}/{server.model}", **where}
        chat(f"{provider} chat", {**name, "messages": messages, "max_tokens": 32})
    name = {"model": f"text-completion-openai/{server.model}", **where}
    completions("completions", {**name, "prompt": BEGINNING, "max_tokens": 8})


if __name__ == "__main__":
    main()
