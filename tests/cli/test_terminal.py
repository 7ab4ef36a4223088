"""`headway chat` at a real pseudo-terminal, over a real HTTP server: commands, several lines, Ctrl-C, resize."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.cli.wrap import Wrapper
from running import running

LONG = "one two three four five six seven eight nine ten eleven twelve"


class Answers(ThreadingHTTPServer):
    """Echoes the last message; `long` has a long answer, and `endless` goes on until the client leaves."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.has_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(b'{"data": [{"id": "tiny"}, {"id": "other"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self._begin()
        said = body["messages"][-1]["content"]
        try:
            pieces = {"endless": itertools.repeat("on "), "long": [LONG]}.get(said, ["you: ", said])
            for piece in pieces:
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                if said == "endless":
                    time.sleep(0.005)
        except OSError:
            self.server.has_left.set()
            return
        self._event({"choices": [], "usage": {"completion_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Terminal:
    """A process at a pseudo-terminal of so many columns."""

    def __init__(self, *arguments: str, home: Path, columns: int = 80) -> None:
        self._master, follower = pty.openpty()
        self.resize(columns)
        environ = {**os.environ, "HOME": str(home), "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        environ.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from headway.cli.main import main; sys.exit(main())", *arguments],
            stdin=follower, stdout=follower, stderr=follower, env=environ, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(follower)
        self.seen = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, most_s: float = 120.0) -> str:
        """What is printed up to a match of the pattern; it is not seen again."""
        end = time.monotonic() + most_s
        while (match := re.search(pattern, self.seen)) is None:
            ready = select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._master, 65536).decode().replace("\r\n", "\n")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C at the prompt until it takes effect: one that comes before the line editor listens is lost."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.until(pattern, 5.0)
        raise AssertionError(f"no {pattern!r} in {self.seen!r}")

    def interrupt_until_it_ends(self) -> int:
        """The same, until the process ends; its exit status."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(5)
        raise AssertionError(f"it goes on: {self.seen!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def answers() -> Iterator[Answers]:
    with running(Answers()) as server:
        yield server


@pytest.fixture
def chat(answers: Answers, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", "--url", answers.url, home=tmp_path)
    try:
        terminal.until("> ")
        yield terminal
    finally:
        terminal.close()


def test_an_answer_comes_with_its_speed_and_every_command_does_what_help_says(
    chat: Terminal, answers: Answers, tmp_path: Path
) -> None:
    chat.type("/help\n")
    helped = chat.until("/bye .*\n> ")
    assert "/set NAME VALUE" in helped
    chat.type("hello\n")
    assert re.search(r"you: hello\n\[7 tokens, [\d.]+ tokens/s, first after \d\.\d\d s\]\n> ", chat.until(r"\]\n> "))
    chat.type("/system Be brief.\n/set temperature 0\nhi\n")
    chat.until(r"you: hi\n\[.*\]\n> ")
    assert answers.bodies[-1]["temperature"] == 0.0
    assert answers.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.type("/retry\n")
    chat.until(r"you: hi\n\[.*\]\n> ")
    assert [message["role"] for message in answers.bodies[-1]["messages"]] == ["system", "user", "assistant", "user"]
    chat.type(f"/save {tmp_path}/said.json\n/clear\nnew\n")
    chat.until(r"you: new\n\[.*\]\n> ")
    assert len(answers.bodies[-1]["messages"]) == 2
    chat.type(f"/load {tmp_path}/said.json\nmore\n")
    chat.until(r"you: more\n\[.*\]\n> ")
    assert [message["content"] for message in answers.bodies[-1]["messages"]][1:] == [
        "hello", "you: hello", "hi", "you: hi", "more",
    ]  # fmt: skip
    chat.type("/bye\n")
    assert chat.process.wait(60) == 0
    assert "hello" in (tmp_path / ".cache/headway/chat_history").read_text()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/what\n", "there is no command /what; /help lists them"),
        ("/set warmth 3\n", "there is no setting 'warmth'; there are: "),
        ("/set temperature 9\n", "temperature is 9; allowed: 0 to 2"),
        ("/save\n", "say /save FILE"),
        ("/load /nowhere/said.json\n", "cannot read /nowhere/said.json: No such file or directory"),
        ("/retry\n", "there is no question to ask again yet"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(chat: Terminal, typed: str, said: str) -> None:
    chat.type(typed)
    assert said in " ".join(chat.until("headway: [^>]*\n> ").split())
    chat.type("still here\n")
    chat.until("you: still here")


def test_a_message_may_have_several_lines(chat: Terminal, answers: Answers) -> None:
    chat.type('"""first\nsecond"""\n')
    chat.until(r"\]\n> ")
    chat.type("third \\\nfourth\n")
    chat.until(r"\]\n> ")
    assert [body["messages"][-1]["content"] for body in answers.bodies] == ["first\nsecond", "third \nfourth"]


def test_an_interrupt_stops_an_answer_and_two_at_the_prompt_leave(chat: Terminal, answers: Answers) -> None:
    chat.type("endless\n")
    chat.until("on on on")
    chat.type("\x03")
    chat.until(r"\[stopped\]\n\[.*\]\n> ")
    assert answers.has_left.wait(60), "the server must see that no client reads"
    chat.interrupt(r"\(Ctrl-C once more leaves; so does /bye\)\n> ")
    chat.type("go on\n")
    chat.until(r"you: go on\n\[.*\]\n> ")
    chat.interrupt(r"\(Ctrl-C once more leaves; so does /bye\)\n> ")
    assert chat.interrupt_until_it_ends() == 130


def test_lines_are_as_wide_as_the_terminal_is_now(chat: Terminal) -> None:
    for columns in (30, 50):
        chat.resize(columns)
        chat.type("long\n")
        answer = chat.until(r"twelve\n\[").rpartition("long\n")[2].removesuffix("\n[")
        lines = answer.split("\n")
        assert " ".join(lines) == LONG
        assert all(len(line) <= columns for line in lines)
        assert len(lines) == -(-len(LONG) // columns)


def test_a_model_that_the_server_does_not_have_is_an_error(answers: Answers, tmp_path: Path) -> None:
    terminal = Terminal("chat", "hi", "--url", answers.url, "--model", "huge", home=tmp_path, columns=200)
    try:
        terminal.until("model is 'huge'; http.* offers tiny, other: name one of these, or none")
        assert terminal.process.wait(60) == 2
    finally:
        terminal.close()


def _wrapped(width: int, *pieces: str) -> str:
    written: list[str] = []
    wrapper = Wrapper(written.append, lambda: width)
    for piece in pieces:
        wrapper.feed(piece)
    wrapper.flush()
    return "".join(written)


def test_words_are_broken_between_whatever_pieces_they_come_in() -> None:
    whole = "a bb ccc dddd\n\n  eeeee ff"
    assert _wrapped(8, whole) == "a bb ccc\ndddd\n\n  eeeee\nff"
    assert _wrapped(8, *whole) == _wrapped(8, whole)
    assert _wrapped(4, "longer than four") == "longer\nthan\nfour"
    assert _wrapped(6, "語語 語語") == "語語\n語語", "a character may be two columns wide"
    code = "see\n```\nlong line of code here\n```\nlong line of text"
    assert _wrapped(10, code) == "see\n```\nlong line of code here\n```\nlong line\nof text"
