"""What was said in a conversation, how its answers are sampled, and files of it. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from headway.cli.args import ChatSampling
from headway.errors import EngineError, RequestError

Message = Mapping[str, str]
Answer = Generator[str, None, int | None]
"""Pieces of text as they come; returns how many tokens they were, None if nothing says."""
Reply = Callable[[Sequence[Message], ChatSampling], Answer]
ROLES = ("system", "user", "assistant")


@dataclass(slots=True)
class Conversation:
    """An answer that was cut off stays in it as far as it came."""

    reply: Reply
    sampling: ChatSampling = field(default_factory=ChatSampling)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was said; the instructions stay."""
        self.messages = []

    def ask(self, text: str) -> Answer:
        """Say `text`; the answer as it comes."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        return self._answer(before)

    def retry(self) -> Answer:
        """Ask the last question again, without the answer it had."""
        before = list(self.messages)
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise RequestError("there is no question to ask again yet")
        return self._answer(before)

    def _answer(self, before: list[Message]) -> Answer:
        """A question that is refused, with no answer begun, leaves the conversation as it was before."""
        said = [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)
        pieces: list[str] = []
        answer = self.reply(said, self.sampling)
        try:
            while True:
                try:
                    piece = next(answer)
                except StopIteration as end:
                    count: int | None = end.value
                    return count
                pieces.append(piece)
                yield piece
        except (RequestError, EngineError):
            if not pieces:
                self.messages = before
            raise
        finally:
            answer.close()
            if self.messages is not before:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def set(self, name: str, value: str) -> None:
        """Sample otherwise from the next answer on."""
        known = {known.name: getattr(self.sampling, known.name) for known in fields(self.sampling)}
        if name not in known:
            raise RequestError(f"there is no setting {name!r}; there are: {', '.join(sorted(known))}")
        try:
            parsed: Any = json.loads(value)
        except ValueError:
            parsed = value
        try:
            changed = replace(self.sampling, **{name: parsed})
            changed.given()
        except (TypeError, ValueError) as error:
            raise RequestError(f"{name} cannot be {value!r}: {error}") from error
        self.sampling = changed

    def save(self, path: str) -> None:
        """Write it as JSON."""
        content = {"system": self.system, "messages": list(self.messages)}
        try:
            Path(path).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from error

    def load(self, path: str) -> None:
        """Go on with one that was saved."""
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in content["messages"]]
            system = content.get("system")
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"{path} is not a conversation that /save wrote") from error
        if any(each["role"] not in ROLES for each in messages):
            raise RequestError(f"{path} has a message of another role than {', '.join(ROLES)}")
        self.messages, self.system = list(messages), None if system is None else str(system)
