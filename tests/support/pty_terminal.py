"""A headway command at a pseudo-terminal, for tests that see what a person would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

HEADWAY = (sys.executable, "-c", "import sys; from headway.cli.main import main; sys.exit(main())")


class Terminal:
    """A process at a pseudo-terminal of so many columns; a dumb one shows nothing that moves."""

    def __init__(
        self,
        *arguments: str,
        home: Path,
        columns: int = 80,
        term: str = "dumb",
        command: Sequence[str] = HEADWAY,
    ) -> None:
        self._master, follower = pty.openpty()
        self.resize(columns)
        environ = {**os.environ, "HOME": str(home), "TERM": term, "PYTHONUNBUFFERED": "1"}
        environ.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [*command, *arguments],
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
            assert ready, f"no {pattern!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def rest(self) -> str:
        """What is printed until the process ends and was not seen yet."""
        with contextlib.suppress(OSError):  # how Linux says that no process has the terminal open any more
            while piece := os.read(self._master, 65536):
                self.seen += piece.decode(errors="replace")
        return self.seen

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C at the prompt until it takes effect: one that comes before the line editor listens is lost."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.until(pattern, 5.0)
        raise AssertionError(f"no {pattern!r} in {self.seen[-2000:]!r}")

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
