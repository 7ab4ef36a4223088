"""Chat messages to the prompt a model expects, by the model's own template.

Owns the child process in which templates run (`chat_child`), its time and size limits, and the meaning of its
answers. A template is untrusted code: it gets a sandbox, a second, and a megabyte. Refuses to know tokens
and HTTP.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from headway.errors import Overloaded, RequestError
from headway.text.call_format import TAGGED, CallFormat, format_of
from headway.text.child import FROM_OUTSIDE, READ_BYTES, ChildPool, LimitedChild
from headway.text.last_message import LastMessage
from headway.text.thoughts import Thinking, has_marks
from headway.text.tool_messages import ToolProbe, prepared
from headway.text.tool_prompt import in_plain_messages

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages, as OpenAI's API has them. A template would write any other into the prompt as it is."""

_START_S = 10.0  # to start Python and compile the template, on a busy machine


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """What one rendering may take."""

    timeout_s: float = 1.0
    most_chars: int = 1 << 20
    memory_bytes: int = 256 << 20  # address space of the child; Python and jinja2 alone take about a tenth


class Rendered(NamedTuple):
    """A prompt, the form of calls in its answer, and whether that has reasoning."""

    text: str
    calls: CallFormat
    thinking: Thinking


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a template is told beside messages and tools."""

    add_generation_prompt: bool = True
    is_continued: bool = False  # the answer goes on with the last message, which is the assistant's
    names: Mapping[str, object] = field(default_factory=dict)  # further variables


class ChatTemplate:
    """Rendered by a few children at most, none of which was given up on. Threads may share it."""

    def __init__(
        self,
        source: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        limits: ChatLimits | None = None,
        max_children: int = 2,
    ) -> None:
        self._source = source
        self._calls = None if source is None else format_of(source)
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._limits = limits if limits is not None else ChatLimits()
        self._children = ChildPool(self._started, max_children)

    @property
    def is_present(self) -> bool:
        """Whether the model brought a template at all."""
        return self._source is not None

    @property
    def has_thoughts(self) -> bool:
        """Whether the template knows reasoning."""
        return self._source is not None and has_marks(self._source)

    def start(self) -> None:
        """Start a child now, so that the first request does not wait for it."""
        if self._source is not None:
            with self._children.borrowed():
                pass

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        names: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt. Blocks until it is rendered or the time is up; `names` are further variables of the template."""
        return self.rendered(messages, (), RenderOptions(add_generation_prompt, names=names or {})).text

    def rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: RenderOptions | None = None,
    ) -> Rendered:
        """As `render`, and what to expect of the text of an answer.

        What of tools, calls and results the template would leave out is written into plain messages.
        """
        if self._source is None:
            raise RequestError(
                "this model has no chat template; send the whole prompt to /v1/completions", param="messages"
            )
        _require_roles(messages)
        options = options or RenderOptions()
        messages = prepared(messages)
        cut = LastMessage.of(messages) if options.is_continued else None
        messages = messages if cut is None else cut.messages
        request = {
            "documents": None,
            **options.names,
            "tools": list(tools) or None,
            "messages": messages,
            "add_generation_prompt": options.add_generation_prompt and cut is None,
        }
        probe = ToolProbe.of(messages, tools)
        format = self._calls
        with self._children.borrowed() as child:
            answer = self._ask(child, request, self._limits.timeout_s)
            if probe is not None and not ("text" in answer and self._reads(child, request, probe)):
                plain = {**request, "messages": in_plain_messages(messages, tools), "tools": None}
                answer = self._ask(child, plain, self._limits.timeout_s)
                format = None
        text, source = self._text(answer), self._source
        if cut is not None:
            return Rendered(cut.before(text), format or TAGGED, Thinking.within(cut.content))
        return Rendered(text, format or TAGGED, Thinking.of(source, text))

    def _reads(self, child: LimitedChild, request: Mapping[str, object], probe: ToolProbe) -> bool:
        """Whether the template renders all that there is of tools, and calls look as is known here."""
        if probe.tools and self._calls is None:
            return False
        probed = {**request, "messages": probe.messages, "tools": probe.tools or None}
        text = self._ask(child, probed, self._limits.timeout_s).get("text")
        return not isinstance(text, str) or probe.is_whole(text)  # a template that fails on other words does read them

    def close(self) -> None:
        """End the children; a later render starts another. A render under way fails."""
        self._children.close()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> LimitedChild:
        child = LimitedChild(Path(__file__).with_name("chat_child.py"))
        setup = {
            "template": self._source,
            "names": self._names,
            "most_chars": self._limits.most_chars,
            "memory_bytes": self._limits.memory_bytes,
            "start_s": 2 * _START_S,
            "alarm_s": 2 * self._limits.timeout_s + 1.0,
        }
        answer = self._ask(child, setup, _START_S)
        if answer.get("ready") is not True:
            child.kill()
            self._text(answer)
        return child

    def _ask(self, child: LimitedChild, line: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """The child's answer; if none comes, the child is killed and its CPU time says whose fault that is."""
        try:
            # Six bytes per character is what JSON needs at most; beyond that the child does not keep its own limit.
            return child.ask(json.dumps(line).encode() + b"\n", timeout_s, 6 * self._limits.most_chars + READ_BYTES)
        except TimeoutError:
            if child.kill() < timeout_s / 5:
                raise _stalled() from None
        except (OSError, EOFError, ValueError):
            child.kill()
            if child.exit_signal in FROM_OUTSIDE:
                raise _stalled() from None
            if child.exit_signal != signal.SIGALRM:
                raise RequestError(
                    "the model's chat template ended its process on these messages; send fewer or shorter",
                    param="messages",
                ) from None
        raise RequestError(
            f"the model's chat template took longer than {timeout_s:g} s on these messages; send fewer or shorter",
            param="messages",
        )

    def _text(self, answer: Mapping[str, object]) -> str:
        text, error, kind = answer.get("text"), answer.get("error"), answer.get("kind")
        if isinstance(text, str):
            return text
        if kind == "long":
            raise RequestError(
                f"the rendered messages have more than {self._limits.most_chars} characters or take more than "
                f"{self._limits.memory_bytes >> 20} MiB to render; send fewer or shorter",
                param="messages",
            )
        if kind == "raised":
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages")
        raise RequestError(f"the model's chat template fails on these messages: {error}", param="messages")


def _stalled() -> Overloaded:
    """The child was stopped, killed or got no time: nothing is wrong with the messages."""
    return Overloaded("the process that renders chat templates did not answer; retry", retry_after_s=1.0)


def _require_roles(messages: Sequence[Mapping[str, object]]) -> None:
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            said = "there is no role given" if role is None else f"there is no role {role!r:.64}"
            where = f"messages[{index}].role"
            raise RequestError(f"{where}: {said}; allowed: {', '.join(ROLES)}", param=where, code="invalid_type")
