"""Chat messages to the prompt a model expects, by the model's own template.

Owns the child process in which templates run (`chat_child`), its time and size limits, and the meaning of its
answers. A template is untrusted code: it gets a sandbox, a second, and a megabyte. Refuses to know tokens
and HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headway.errors import RequestError
from headway.text.tool_messages import ToolProbe, prepared

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages, as OpenAI's API has them. A template would write any other into the prompt as it is."""

_READ_BYTES = 1 << 16
_START_S = 10.0  # to start Python and compile the template, on a busy machine


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """What one rendering may take."""

    timeout_s: float = 1.0
    most_chars: int = 1 << 20
    memory_bytes: int = 256 << 20  # address space of the child; Python and jinja2 alone take about a tenth


class ChatTemplate:
    """At most one child lives at a time, it has rendered nothing that was given up on, and threads may share it."""

    def __init__(
        self,
        source: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        limits: ChatLimits | None = None,
    ) -> None:
        self._source = source
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._limits = limits if limits is not None else ChatLimits()
        self._child: _Child | None = None
        self._lock = threading.Lock()

    @property
    def is_present(self) -> bool:
        """Whether the model brought a template at all."""
        return self._source is not None

    def start(self) -> None:
        """Start the child now, so that the first request does not wait for it."""
        if self._source is not None:
            with self._lock:
                self._ready_child(self._source)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        names: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt. Blocks until it is rendered or the time is up; `names` are further variables of the template.

        Tool calls and their results that the template would leave out are refused.
        """
        if self._source is None:
            raise RequestError(
                "this model has no chat template; send the whole prompt to /v1/completions", param="messages"
            )
        _require_roles(messages)
        messages = prepared(messages)
        request = {
            "tools": None,
            "documents": None,
            **(names or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        probe = ToolProbe.of(messages)
        with self._lock:
            child = self._ready_child(self._source)
            answer = self._ask(child, request, self._limits.timeout_s)
            if probe is not None and "text" in answer:
                probed = self._ask(child, {**request, "messages": probe.messages}, self._limits.timeout_s).get("text")
                if isinstance(probed, str):  # a template that fails on other words does read them
                    probe.require(probed)
        return self._text(answer)

    def close(self) -> None:
        """End the child; a later render starts another."""
        with self._lock:
            self._drop()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready_child(self, source: str) -> _Child:
        if self._child is not None and self._child.is_alive:
            return self._child
        self._drop()
        self._child = child = _Child()
        setup = {
            "template": source,
            "names": self._names,
            "most_chars": self._limits.most_chars,
            "memory_bytes": self._limits.memory_bytes,
            "start_s": 2 * _START_S,
            "alarm_s": 2 * self._limits.timeout_s + 1.0,
        }
        answer = self._ask(child, setup, _START_S)
        if answer.get("ready") is not True:
            self._drop()
            self._text(answer)
        return child

    def _ask(self, child: _Child, line: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        try:
            # Six bytes per character is what JSON needs at most; beyond that the child does not keep its own limit.
            return child.ask(json.dumps(line).encode() + b"\n", timeout_s, 6 * self._limits.most_chars + _READ_BYTES)
        except TimeoutError:
            self._drop()
            raise RequestError(
                f"the model's chat template took longer than {timeout_s:g} s on these messages; send fewer or shorter",
                param="messages",
            ) from None
        except (OSError, EOFError, ValueError):
            self._drop()
            raise RequestError(
                "the model's chat template ended its process on these messages; send fewer or shorter",
                param="messages",
            ) from None

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

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _require_roles(messages: Sequence[Mapping[str, object]]) -> None:
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            said = "there is no role given" if role is None else f"there is no role {role!r:.64}"
            where = f"messages[{index}].role"
            raise RequestError(f"{where}: {said}; allowed: {', '.join(ROLES)}", param=where, code="invalid_type")


class _Child:
    """One process, one question at a time; after any exception it must be killed, for it may still be answering."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("chat_child.py")
        # -P: the folder of the script is no place to import from. By path: `-m` would import headway itself.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, timeout_s: float, most_bytes: int) -> dict[str, object]:
        """Send a line and wait for one; TimeoutError, EOFError, OSError or ValueError if that does not come."""
        deadline = time.monotonic() + timeout_s
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._in, selectors.EVENT_WRITE)
            rest = memoryview(line)
            while not answer.endswith(b"\n"):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise TimeoutError
                for key, _ in events:
                    if key.fileobj is self._out:
                        answer += self._read()
                    else:
                        rest = rest[os.write(self._in.fileno(), rest[:_READ_BYTES]) :]
                        if not rest:
                            selector.unregister(self._in)
                if len(answer) > most_bytes:
                    raise ValueError("the answer is longer than any that keeps the limits")
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise ValueError("the answer is no object")
        return found

    def kill(self) -> None:
        self._process.kill()
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _read(self) -> bytes:
        chunk = os.read(self._out.fileno(), _READ_BYTES)
        if not chunk:
            raise EOFError
        return chunk
