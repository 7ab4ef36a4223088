"""`headway chat`: a conversation in the terminal, with a running server or with a model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.cli.args import ChatFlags, ChatSampling, Common, CommonFlags, EngineFlags, EngineOptions, Switch
from headway.cli.choice import describe, formats, only_adapter
from headway.cli.conversation import Answer, Conversation, Message, Reply
from headway.cli.remote import Remote
from headway.cli.talk import Talk
from headway.cli.terminal import held_interrupts, spinner
from headway.config import EngineConfig, ModelConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.llm import LLM

EXAMPLES = """Examples:
  headway chat
  headway chat "Say hello in French" --temperature 0
  headway chat --url http://127.0.0.1:8000 --system "Answer briefly."
  HEADWAY_API_KEY=secret headway chat --url https://models.example.org

In the conversation /help lists the commands, Ctrl-C stops an answer and /bye leaves."""


def chat(
    message: str | None = None,
    /,
    *,
    url: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    quiet: Switch = False,
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
    quiet
        No banner, and no speed after an answer.
    """
    config = engine.config(None)
    if common.print_config:
        print(describe(config))
        return 0
    sampling.given()  # a value out of range is found before a model is loaded or a server asked
    if url is not None:
        remote = Remote(url, api_key)
        model = choose_model(remote, config.model)
        return talk(remote_reply(remote, model), message, system, sampling, f"{model} at {url}", quiet)
    from headway.llm import LLM  # takes a second

    with spinner(f"loading {config.model.model}"):
        llm = LLM(config=config)
    try:
        return talk(
            local_reply(llm, only_adapter(config.model)),
            message,
            system,
            sampling,
            _about(config, llm.info.max_model_len),
            quiet,
        )
    finally:
        llm.close()


def talk(
    reply: Reply, message: str | None, system: str | None, sampling: ChatSampling, about: str, is_quiet: bool
) -> int:
    """One answer to `message`, or a conversation."""
    conversation = Talk(Conversation(reply, sampling, system), about, is_quiet or message is not None)
    if message is None:
        return conversation.run()
    conversation.say(message)
    return 0


def choose_model(remote: Remote, wanted: ModelConfig) -> str:
    """The model to ask the server for: the one that was named, if it has that one, else its first."""
    named = wanted.served_model_name or (wanted.model if wanted.model != ModelConfig().model else None)
    offered = remote.models()
    if named is not None and named not in offered:
        raise ConfigError(f"model is {named!r}; {remote.url} offers {', '.join(offered)}: name one of these, or none")
    return named or offered[0]


def local_reply(llm: LLM, adapter: str = "") -> Reply:
    """Answers of a model in this process; Ctrl-C ends one between two steps of the engine, which goes on to be used."""

    def reply(messages: Sequence[Message], sampling: ChatSampling) -> Answer:
        with held_interrupts() as check:
            values = sampling.given()
            return (yield from llm.stream_chat(messages, values, lambda done, num: check(), adapter=adapter))

    return reply


def remote_reply(remote: Remote, model: str) -> Reply:
    """Answers of a server. Others may not know every extension: what keeps its neutral value is not sent."""

    def options(sampling: ChatSampling) -> dict[str, Any]:
        neutral = ChatSampling()
        sent = {name: value for name, value in sampling.given().items() if value != getattr(neutral, name)}
        return {"model": model, **sent}

    return lambda messages, sampling: remote.stream(messages, options(sampling))


def _about(config: EngineConfig, max_len: int) -> str:
    return f"{config.model.model} ({formats(config)['dtype']}), context of {max_len:,} tokens, in this process"
