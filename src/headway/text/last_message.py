"""The last message of a conversation as the beginning of the answer: the prompt ends where that message ends.

What a template puts behind a message is cut off, found by a random word at the end of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from headway.errors import RequestError


@dataclass(frozen=True, slots=True)
class LastMessage:
    """A conversation whose last message ends with `mark`."""

    messages: list[Mapping[str, Any]]
    content: str
    mark: str

    @staticmethod
    def of(messages: Sequence[Mapping[str, Any]]) -> LastMessage:
        """RequestError if the last message is not the beginning of an answer."""
        last, where = messages[-1], f"messages[{len(messages) - 1}]"
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
            raise RequestError(
                f"continue_final_message needs a text of the role assistant at the end; {where} is none",
                param="continue_final_message",
            )
        mark = token_hex(16)
        return LastMessage([*messages[:-1], {**last, "content": content + mark}], content, mark)

    def before(self, text: str) -> str:
        """What was rendered, up to the end of the last message."""
        before, found, _ = text.rpartition(self.mark)
        if not found:
            raise RequestError(
                "this model's chat template does not render the last message, so that no answer can go on with it",
                param="continue_final_message",
            )
        return before
