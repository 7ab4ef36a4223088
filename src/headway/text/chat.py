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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headway.errors import Overloaded, RequestError
from headway.text.tool_messages import ToolProbe, prepared

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages, as OpenAI's API has them. A template would write any other into the prompt as it is."""

_READ_BYTES = 1 << 16
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_START_S = 10.0  # to start Python and compile the template, on a busy machine


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """What one rendering may take."""

    timeout_s: float = 1.0
    most_chars: int = 1 << 20
    memory_bytes: int = 256 << 20  # address space of the child; Python and jinja2 alone take about a tenth


class ChatTemplate:
    """A few children at most, each with one request at a time and none that was given up on. Threads may share it."""

    def __init__(
        self,
        source: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        limits: ChatLimits | None = None,
        max_children: int = 2,
    ) -> None:
        self._source = source
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._limits = limits if limits is not None else ChatLimits()
        self._max_children = max_children
        self._idle: list[_Child] = []
        self._lent: set[_Child] = set()
        self._num_starting = 0
        self._change = threading.Condition()

    @property
    def is_present(self) -> bool:
        """Whether the model brought a template at all."""
        return self._source is not None

    def start(self) -> None:
        """Start a child now, so that the first request does not wait for it."""
        if self._source is not None:
            with self._borrowed(self._source):
                pass

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
        with self._borrowed(self._source) as child:
            answer = self._ask(child, request, self._limits.timeout_s)
            if probe is not None and "text" in answer:
                probed = self._ask(child, {**request, "messages": probe.messages}, self._limits.timeout_s).get("text")
                if isinstance(probed, str):  # a template that fails on other words does read them
                    probe.require(probed)
        return self._text(answer)

    def close(self) -> None:
        """End the children; a later render starts another. A render under way fails."""
        with self._change:
            for child in self._lent:
                child.end()
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _borrowed(self, source: str) -> Iterator[_Child]:
        """A child for one request; blocks while all are at work."""
        child = self._take(source)
        try:
            yield child
        finally:
            with self._change:
                self._lent.discard(child)
                can_go_on = child.is_alive and not child.is_ending
                if can_go_on:
                    self._idle.append(child)
                self._change.notify()
            if not can_go_on:
                child.kill()

    def _take(self, source: str) -> _Child:
        with self._change:
            while not self._idle and len(self._lent) + self._num_starting >= self._max_children:
                self._change.wait()
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    self._lent.add(child)
                    return child
                child.kill()  # it ended by itself: what is left of it
            self._num_starting += 1
        started: _Child | None = None
        try:
            started = self._started(source)
            return started
        finally:
            with self._change:
                self._num_starting -= 1
                if started is not None:
                    self._lent.add(started)
                self._change.notify()

    def _started(self, source: str) -> _Child:
        child = _Child()
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
            child.kill()
            self._text(answer)
        return child

    def _ask(self, child: _Child, line: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """The child's answer; if none comes, the child is killed and its CPU time says whose fault that is."""
        try:
            # Six bytes per character is what JSON needs at most; beyond that the child does not keep its own limit.
            return child.ask(json.dumps(line).encode() + b"\n", timeout_s, 6 * self._limits.most_chars + _READ_BYTES)
        except TimeoutError:
            if child.kill() < timeout_s / 5:
                raise _stalled() from None
        except (OSError, EOFError, ValueError):
            child.kill()
            if child.exit_signal in _FROM_OUTSIDE:
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
        self._cpu_s = 0.0  # as of its last answer
        self.is_ending = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_signal(self) -> int | None:
        """The signal that ended it, once it has ended."""
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

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
        cpu_s = found.get("cpu_s")
        self._cpu_s = cpu_s if isinstance(cpu_s, float) else self._cpu_s
        return found

    def end(self) -> None:
        """Have it end while another thread waits for its answer; that one must then `kill` it."""
        self.is_ending = True
        self._process.kill()

    def kill(self) -> float:
        """End it for good; the CPU seconds since its last answer."""
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()
        if not self.is_alive:
            return 0.0
        self._process.kill()
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime - self._cpu_s

    def _read(self) -> bytes:
        chunk = os.read(self._out.fileno(), _READ_BYTES)
        if not chunk:
            raise EOFError
        return chunk
