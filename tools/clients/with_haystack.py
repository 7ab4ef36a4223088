"""haystack: `OpenAIChatGenerator`, plain and streamed."""

from __future__ import annotations

from typing import Any

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.utils import Secret
from report import QUESTION, check_answer, require, say_version, target


def answer(generator: OpenAIChatGenerator, what: str) -> str:
    (reply,) = generator.run([ChatMessage.from_user(QUESTION)])["replies"]
    used: Any = reply.meta["usage"]
    counts = (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"])
    check_answer(what, QUESTION, reply.text, reply.meta["finish_reason"], counts)
    return reply.text or ""


def main() -> None:
    server = target()
    say_version("haystack-ai")
    where = {"model": server.model, "api_base_url": server.base_url, "api_key": Secret.from_token("any")}
    settings = {"temperature": 0, "max_tokens": 32}
    answer(OpenAIChatGenerator(**where, generation_kwargs=settings), "chat")
    pieces: list[str] = []

    def keep(chunk: StreamingChunk) -> None:
        pieces.append(chunk.content)

    streamed = {**settings, "stream_options": {"include_usage": True}}
    text = answer(OpenAIChatGenerator(**where, generation_kwargs=streamed, streaming_callback=keep), "chat, streamed")
    require("".join(pieces) == text, f"the callback got {pieces}")


if __name__ == "__main__":
    main()
