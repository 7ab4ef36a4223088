"""The conversation at a terminal: commands, lines of input, answers as they come. A pipe gets the answers alone."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from headway.cli.conversation import Answer, Conversation
from headway.cli.wrap import Wrapper
from headway.errors import EngineError, RequestError

FENCE = '"""'
COMMANDS = {
    "/help": "what can be typed here",
    "/system TEXT": "instructions for all answers; without TEXT, show them",
    "/set NAME VALUE": "sample otherwise, such as /set temperature 0; without NAME, show all settings",
    "/save FILE": "write the conversation",
    "/load FILE": "go on with one that was written",
    "/retry": "ask the last question again",
    "/clear": "forget what was said; /new does so too",
    "/bye": "leave; so do /exit, Ctrl-D, and Ctrl-C twice",
}
TIPS = f"""/help lists commands, Ctrl-C stops an answer, /bye leaves.
{FENCE} begins and ends a message of several lines; a \\ at its end continues a line."""
HISTORY = Path("~/.cache/headway/chat_history")


@contextlib.contextmanager
def line_editing(is_terminal: bool) -> Iterator[None]:
    """Cursor keys and the lines typed in earlier conversations, where Python has readline."""
    if not is_terminal:
        yield
        return
    try:
        import readline  # not on every platform
    except ImportError:
        yield
        return
    path = HISTORY.expanduser()
    readline.set_history_length(1000)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


class Talk:
    """`about` is the banner; with `is_quiet` neither it nor the speed of answers is shown."""

    def __init__(self, conversation: Conversation, about: str = "", is_quiet: bool = False) -> None:
        self._conversation = conversation
        self._about = about
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._shows = self._is_terminal and not is_quiet

    def run(self) -> int:
        """Read, answer, and so on until the end; the process's exit status."""
        if self._shows:
            print(f"{self._about}\n{TIPS}", flush=True)
        num_interrupts = 0
        with line_editing(self._is_terminal):
            while True:
                try:
                    text = self._read()
                except EOFError:
                    return 0
                except KeyboardInterrupt:
                    num_interrupts += 1
                    if not self._is_terminal or num_interrupts == 2:
                        raise
                    print("\n(Ctrl-C once more leaves; so does /bye)", flush=True)
                    continue
                num_interrupts = 0
                if text in ("/bye", "/exit"):
                    return 0
                if text:
                    self._obey(text)

    def say(self, text: str) -> None:
        """Ask and print the answer as it comes."""
        self._print(self._conversation.ask(text))

    def _read(self) -> str:
        lines = [input("> " if self._is_terminal else "")]
        while lines[-1].endswith("\\") or (lines[0].lstrip().startswith(FENCE) and _is_open(lines)):
            lines.append(input(". " if self._is_terminal else ""))
        text = "\n".join(line.removesuffix("\\") for line in lines).strip()
        return text.removeprefix(FENCE).removesuffix(FENCE).strip() if text.startswith(FENCE) else text

    def _obey(self, text: str) -> None:
        """A command, or something to say."""
        name, _, rest = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/save": lambda path: self._conversation.save(_needed(path, "/save FILE")),
            "/load": lambda path: self._conversation.load(_needed(path, "/load FILE")),
            "/retry": lambda _: self._print(self._conversation.retry()),
            "/clear": lambda _: self._conversation.clear(),
            "/new": lambda _: self._conversation.clear(),
        }
        try:
            if name in commands:
                commands[name](rest.strip())
            elif name.startswith("/") and self._is_terminal:
                raise RequestError(f"there is no command {name}; /help lists them")
            else:
                self.say(text)
        except (RequestError, EngineError) as error:
            # A server may be back for the next message; a pipe does not wait for that.
            if isinstance(error, EngineError) and not self._is_terminal:
                raise
            print(f"headway: {error}", file=sys.stderr, flush=True)

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, what in COMMANDS.items():
            print(f"  {usage:{width}}  {what}")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        else:
            print(self._conversation.system or "(no instructions)")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            for known, now in asdict(self._conversation.sampling).items():
                print(f"  {known} = {'not set' if now in (None, ()) else now}")
        else:
            self._conversation.set(name, _needed(value.strip(), f"/set {name} VALUE"))

    def _print(self, answer: Answer) -> None:
        """The answer as it comes, and how fast it came; Ctrl-C ends it, and what has come stays."""
        out = Wrapper(sys.stdout.write, lambda: shutil.get_terminal_size().columns) if self._is_terminal else None
        began, first_s, count = time.perf_counter(), None, None
        try:
            while True:
                piece = next(answer)
                first_s = time.perf_counter() - began if first_s is None and piece else first_s
                if out is None:
                    sys.stdout.write(piece)
                else:
                    out.feed(piece)
                sys.stdout.flush()
        except StopIteration as end:
            count = end.value
        except KeyboardInterrupt:
            answer.close()
            if out is not None:
                out.flush()
            print(" [stopped]", end="")
        except EngineError:
            if first_s is not None:  # the message goes on a line of its own
                if out is not None:
                    out.flush()
                print(flush=True)
            raise
        if out is not None:
            out.flush()
        print(flush=True)
        if self._shows and first_s is not None:
            print(_speed(count, first_s, time.perf_counter() - began), flush=True)


def _speed(count: int | None, first_s: float, total_s: float) -> str:
    rate = f"{count} tokens, {(count - 1) / max(total_s - first_s, 1e-9):.1f} tokens/s, " if count and count > 1 else ""
    return f"[{rate}first after {first_s:.2f} s]"


def _is_open(lines: list[str]) -> bool:
    """True while the closing mark of a message of several lines has not come."""
    text = "\n".join(lines).strip()
    return len(text) < 2 * len(FENCE) or not text.endswith(FENCE)


def _needed(value: str, usage: str) -> str:
    if not value:
        raise RequestError(f"say {usage}")
    return value
