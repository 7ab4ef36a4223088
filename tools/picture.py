#!/usr/bin/env python
"""Draw docs/images/terminal.svg, the picture of the README, from a real run at a pseudo-terminal.

    .venv/bin/python tools/picture.py [FILE]

Every command of `SCENES` runs as it stands there, with `headway` of this interpreter's environment, and what it prints
is what the picture shows. Bars on stderr are left out. A scene named `&` runs until the last one has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import html
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, TIMEOUT = 100, 600.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A command; what is typed once its output has which pattern; the lines that the picture leaves out."""

    command: str
    typed: tuple[tuple[str, str], ...] = ()
    ready: str = ""  # a server: this line says that the next scene may begin
    hides: str = r"$^"


SCENES = (
    Scene("headway serve --target-itl-ms 50 &", ready="headway serves", hides=r"(?!headway serves)"),
    Scene(
        "headway chat --url http://127.0.0.1:8000",
        (
            (r"> ", "What is the capital of France?"),
            (r"tokens/s[^>]*> ", "Tell me more about it."),
            (r"tokens/s[^>]*> ", "/bye"),
        ),
        hides=r'^"""|> /bye',
    ),
    Scene(
        "curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        """    -d '{"messages": [{"role": "user", "content": "Hi!"}], "slo": {"ttft_ms": 500}}' \\\n"""
        "    | jq -c '.headway | {predicted_ttft_ms, ttft_ms, slo_met}'"
    ),
    Scene("headway verify", hides=r"^\s*$"),
)


class Screen:
    """Lines of (character, style) as a terminal would show them: the few controls that our commands use."""

    CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            control = self.CONTROL.match(text, at)
            if control:
                self._control(*control.groups())
                at = control.end()
            else:
                self._put(text[at])
                at += 1

    def _put(self, char: str) -> None:
        if char == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append([])
        elif char == "\r":
            self._column = 0
        elif char == "\b":
            self._column = max(0, self._column - 1)
        elif char >= " ":
            line = self.lines[self._row]
            line.extend([(" ", "")] * (self._column + 1 - len(line)))
            line[self._column] = (char, self._style)
            self._column += 1

    def _control(self, numbers: str, name: str) -> None:
        if name == "m":
            self._style = "" if numbers in ("", "0") else f"{self._style};{numbers}"
        elif name == "K":
            line = self.lines[self._row]
            del line[0 if numbers == "2" else self._column :]
        elif name == "A":
            self._row = max(0, self._row - int(numbers or 1))

    def texts(self) -> list[str]:
        return ["".join(char for char, _ in line).rstrip() for line in self.lines]


@dataclass(slots=True)
class Terminal:
    """A command at a pseudo-terminal; its stderr too only if it is interactive or a server, for bars are noise."""

    scene: Scene
    screen: Screen = field(default_factory=Screen)
    process: subprocess.Popen[bytes] | None = None
    _unread: str = ""  # what came after the last pattern
    _fd: int = -1

    def start(self) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        has_stderr = self.scene.typed or self.scene.ready
        command = self.scene.command.removesuffix("&")
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}" if has_stderr else command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if has_stderr else subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self._fd = ours

    def play(self) -> None:
        """Until the command ends, or says that it is ready."""
        for pattern, text in self.scene.typed:
            self._read_until(pattern)
            os.write(self._fd, text.encode() + b"\r")
        self._read_until(self.scene.ready or None)

    def stop(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        self._read_until(None)

    def _read_until(self, pattern: str | None) -> None:
        """None: until it ends."""
        deadline = time.monotonic() + TIMEOUT
        while pattern is None or not (found := re.search(pattern, self._unread)):
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemExit(f"{self.scene.command!r} is silent for {TIMEOUT:.0f} s: {self._unread[-500:]}")
            try:
                read = os.read(self._fd, 65536).decode(errors="replace")
            except OSError:  # its end is closed
                read = ""
            if not read:
                if pattern is None:
                    return
                raise SystemExit(f"{self.scene.command!r} ended before {pattern!r}: {self._unread[-500:]}")
            self._unread += read
            self.screen.feed(read)
        self._unread = self._unread[found.end() :]


def play(scenes: tuple[Scene, ...]) -> list[list[tuple[str, str]]]:
    """The lines of the picture."""
    lines: list[list[tuple[str, str]]] = []
    with contextlib.ExitStack() as stack:
        for scene in scenes:
            terminal = Terminal(scene)
            terminal.start()
            if scene.ready:
                stack.callback(terminal.stop)
            terminal.play()
            first, *rest = scene.command.splitlines()
            prompt = [[("$", "1;32"), (" ", ""), *((char, "1") for char in first)]]
            lines += prompt + [[(char, "1") for char in line] for line in rest]
            shown = zip(terminal.screen.lines, terminal.screen.texts(), strict=True)
            lines += [line for line, text in shown if text and not re.match(scene.hides, text)] + [[]]
    return lines[:-1]


COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea"}
COLOURS |= {"2": "#8b949e", "90": "#6e7681", "91": "#ffa198", "37": "#b1bac4"}
WIDTH, HEIGHT, MARGIN, BAR = 8.4, 19, 18, 34


def svg(lines: list[list[tuple[str, str]]]) -> str:
    """One `text` per line and one `tspan` per style; system fonts, nothing from elsewhere."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN + BAR
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"',
        ' aria-label="headway at a terminal: chat, a request with an objective, and verify">\n',
        f'<rect width="{width:.0f}" height="{height}" rx="10" fill="#0d1117"/>\n',
    ]
    parts += [f'<circle cx="{22 + 20 * each}" cy="20" r="6" fill="#30363d"/>\n' for each in range(3)]
    parts.append(
        '<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14"'
    )
    parts.append(' fill="#e6edf3">\n')
    for number, line in enumerate(lines):
        y = MARGIN + BAR + number * HEIGHT + 4
        spans = "".join(
            f'<tspan x="{MARGIN + at * WIDTH:.1f}" textLength="{len(text) * WIDTH:.1f}"{_attributes(style)}>'
            f"{html.escape(text)}</tspan>"
            for at, text, style in _runs(line)
        )
        if spans:
            parts.append(f'<text y="{y}">{spans}</text>\n')
    return "".join([*parts, "</g>\n</svg>\n"])


def _runs(line: list[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """Stretches of one style without wide gaps, which viewers may collapse: column, text, style."""
    begin = 0
    for at in range(1, len(line) + 1):
        if at == len(line) or line[at][1] != line[begin][1]:
            text = "".join(char for char, _ in line[begin:at])
            for words in re.finditer(r"\S+(?: \S+)*", text):
                yield begin + words.start(), words.group(), line[begin][1]
            begin = at


def _attributes(style: str) -> str:
    codes = style.split(";")
    colour = next((COLOURS[code] for code in reversed(codes) if code in COLOURS), None)
    return (' font-weight="bold"' if "1" in codes else "") + (f' fill="{colour}"' if colour else "")


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg(play(SCENES)))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
