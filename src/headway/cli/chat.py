"""`headway chat`: a conversation in the terminal, with a running server or with a model in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.cli.args import ChatFlags, ChatSampling, Common, CommonFlags, EngineFlags, EngineOptions
from headway.cli.choice import describe
from headway.cli.remote import Remote

EXAMPLES = """Examples:
  headway chat
  headway chat "Say hello in French" --temperature 0
  headway chat --url http://127.0.0.1:8000 --system "You answer in one sentence."
  HEADWAY_API_KEY=secret headway chat --url https://models.example.org

In the conversation: /new forgets what was said, /exit ends, Ctrl-C stops an answer."""

Message = Mapping[str, str]
Reply = Callable[[list[Message]], Iterator[str]]


@dataclass(slots=True)
class Conversation:
    """What was said so far. An answer that was cut off stays in it as far as it came."""

    reply: Reply
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> None:
        """Send `text` and print the answer as it comes."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self.reply(self.messages):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        print(flush=True)


def chat(
    message: str | None = None,
    /,
    *,
    url: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    sampling: ChatFlags = ChatSampling(),
    engine: EngineFlags = EngineOptions(),
    common: CommonFlags = Common(),
) -> int:
    """Talk to a model; answers appear as they are written.

    Parameters
    ----------
    message
        Say this, print the answer and exit; without it a conversation starts.
    url
        A running server; without it the model is loaded in this process.
    api_key
        The server's key.
    system
        Instructions that precede the conversation.
    """
    config = engine.config(None)
    if common.print_config:
        print(describe(config))
        return 0
    given = sampling.given()  # a value out of range is found before anything is loaded or asked
    if url is not None:
        return converse(remote_reply(url, api_key, config.model.served_model_name, given), message, system)
    from headway.llm import LLM  # imports torch, which takes a second

    llm = LLM(config=config)
    try:
        return converse(lambda messages: llm.stream_chat(messages, given), message, system)
    finally:
        llm.close()


def remote_reply(url: str, api_key: str | None, model: str | None, given: Mapping[str, Any]) -> Reply:
    remote = Remote(url, api_key)
    options: dict[str, Any] = {"model": model or remote.model()}
    for name, value in given.items():
        # Other servers may not know every extension: what keeps its neutral value is not sent.
        if value != getattr(ChatSampling(), name):
            options[name] = value
    return lambda messages: remote.stream(messages, options)


def converse(reply: Reply, message: str | None, system: str | None) -> int:
    conversation = Conversation(reply, system)
    if message is not None:
        conversation.say(message)
        return 0
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return 0
        if text == "/exit":
            return 0
        if text == "/new":
            conversation.forget()
        elif text:
            conversation.say(text)
