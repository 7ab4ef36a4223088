"""llama-index: `OpenAILike`, as a chat model and for text completions, plain and streamed."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import BEGINNING, QUESTION, check_answer, passed, require, say_version, target


def counts(raw: Any) -> tuple[int, int, int]:
    return raw.usage.prompt_tokens, raw.usage.completion_tokens, raw.usage.total_tokens


def main() -> None:
    server = target()
    say_version("llama-index-llms-openai-like")
    where = {"model": server.model, "api_base": server.base_url, "api_key": "any", "max_retries": 0, "temperature": 0}
    model = OpenAILike(**where, is_chat_model=True, max_tokens=32)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = model.chat(messages)
    finish = answer.raw.choices[0].finish_reason
    check_answer("chat", QUESTION, answer.message.content, finish, counts(answer.raw))
    text = "".join(chunk.delta or "" for chunk in model.stream_chat(messages))
    require(text == answer.message.content, f"streamed: {text!r}")
    passed("chat, streamed", QUESTION, text)
    model = OpenAILike(**where, is_chat_model=False, max_tokens=8)
    completion = model.complete(BEGINNING)
    finish = completion.raw.choices[0].finish_reason
    check_answer("completions", BEGINNING, completion.text, finish, counts(completion.raw))
    text = "".join(chunk.delta or "" for chunk in model.stream_complete(BEGINNING))
    require(text == completion.text, f"streamed: {text!r}")
    passed("completions, streamed", BEGINNING, text)


if __name__ == "__main__":
    main()
