"""`headway chat` at a real pseudo-terminal, over a real HTTP server: commands, several lines, Ctrl-C, resize."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.cli.wrap import Wrapper
from pty_terminal import Terminal
from running import running
from tiny_dir import write_tiny_model

LONG = "one two three four five six seven eight nine ten eleven twelve"


class Answers(ThreadingHTTPServer):
    """Echoes the last message; `long` has a long answer, `endless` goes on until the client leaves.

    `refused` is answered 400, and the answer to `cut off` has no end.

    The second half of the answer to `halves` waits for `is_resized`.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.has_left = threading.Event()
        self.is_resized = threading.Event()

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
        said = body["messages"][-1]["content"]
        if said == "refused":
            self.send_error(400)
            return
        self._begin()
        try:
            known = {"endless": itertools.repeat("on "), "long": [LONG], "halves": self._halves()}
            pieces = known.get(said, ["you: ", said])
            for piece in pieces:
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                if said == "endless":
                    time.sleep(0.005)
        except OSError:
            self.server.has_left.set()
            return
        if said == "cut off":
            return
        self._event({"choices": [], "usage": {"completion_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _halves(self) -> Iterator[str]:
        yield f"{LONG}. "
        self.server.is_resized.wait(60)
        yield LONG

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


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


def test_a_server_that_refuses_or_leaves_does_not_end_the_conversation(chat: Terminal, answers: Answers) -> None:
    chat.type("one\n")
    chat.until(r"you: one\n\[.*\]\n> ")
    chat.type("refused\n")
    assert "answered 400" in chat.until("headway: [^>]*\n> ")
    chat.type("two\n")
    chat.until(r"you: two\n\[.*\]\n> ")
    said = [message["content"] for message in answers.bodies[-1]["messages"]]
    assert said == ["one", "you: one", "two"], "what was refused would be refused with every later message"
    chat.type("cut off\n")
    assert "closed the connection" in chat.until("you: cut off\nheadway: [^>]*\n> ")
    chat.type("three\n")
    chat.until(r"you: three\n\[.*\]\n> ")
    assert answers.bodies[-1]["messages"][-2]["content"] == "you: cut off", "what has come stays"


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


def test_a_resize_in_the_middle_of_an_answer_counts_at_once(chat: Terminal, answers: Answers) -> None:
    chat.resize(50)
    chat.type("halves\n")
    first = chat.until(r"twelve\.").rpartition("halves\n")[2]
    chat.resize(24)
    answers.is_resized.set()
    second = chat.until(r"twelve\n\[").removesuffix("\n[")
    assert [line for line in first.split("\n") if len(line) > 50] == []
    assert any(len(line) > 24 for line in first.split("\n")), "before, the wider terminal is made use of"
    begun = first.rpartition("\n")[2]
    lines = (begun + second).split("\n")
    assert " ".join(lines).endswith(f". {LONG}")
    assert [line for line in lines[1:] if len(line) > 24] == []


def test_a_pipe_is_a_conversation_without_prompts(answers: Answers) -> None:
    command = [sys.executable, "-m", "headway.cli.main", "chat", "--url", answers.url]
    done = subprocess.run(command, input="one\ntwo\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "you: one\nyou: two\n", "")
    assert len(answers.bodies[-1]["messages"]) == 3


def test_a_model_in_this_process_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", max_len=60_000)
    fields = {"model": tmp_path / "tiny", "cache-dir": tmp_path, "num-blocks": 4000, "threads": 1, "temperature": 0}
    flags = [f"--{name}={value}" for name, value in fields.items()]
    chat = Terminal("chat", "--ignore-eos", "--max-tokens=50000", *flags, home=tmp_path, term="xterm")
    try:
        chat.until(r"loading \S+tiny")  # the spinner
        chat.until("tiny.*context of 60,000 tokens")
        for _ in range(2):
            chat.until("> ")
            chat.type("abc\n")
            chat.until(r"abc\r?\n(?s:.{300})")
            chat.type("\x03")
            chat.until(r"\[stopped\]")
        chat.type("/set max_tokens 4\nabc\n")
        chat.until(r"\[4 tokens, ")
    finally:
        chat.close()


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
