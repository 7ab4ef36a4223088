"""What the client scripts share: where the server is, what to ask it, and how a script tells `run.py` what it saw.

Standard library only, since every client has an environment of its own. One JSON object per line goes to stdout; a
check that fails ends the script with a sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, NoReturn

QUESTION = "What is the capital of France?"
PERSON = "Anna is 31 years old. Extract name and age."
BEGINNING = "The capital of France is"
LIMIT_S = 240


class Target(NamedTuple):
    """The server that a script talks to."""

    url: str  # without /v1
    model: str
    tokenizer: str  # a directory that transformers reads
    scratch: Path  # an empty directory

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


def target() -> Target:
    url, model, tokenizer, scratch = sys.argv[1:5]
    return Target(url, model, tokenizer, Path(scratch))


def say_version(distribution: str) -> None:
    print(json.dumps({"version": f"{distribution} {version(distribution)}"}), flush=True)


def passed(what: str, asked: str = "", text: str | None = None) -> None:
    """One thing the client did. `text` is a greedy answer to what was `asked`: every client has to get the same."""
    print(json.dumps({"ran": what, "asked": asked, "text": (text or "").strip()}), flush=True)


def fail(message: str) -> NoReturn:
    raise SystemExit(f"failed: {message}")


def require(is_true: object, message: str) -> None:
    if not is_true:
        fail(message)


def check_answer(
    what: str, asked: str, text: str | None, finish: str | None, usage: tuple[int, int, int] | None
) -> None:
    """A greedy answer to the question or the beginning: it names Paris, ended for a reason, and was counted."""
    require(text and "Paris" in text, f"{what}: the text is {text!r}")
    require(finish in ("stop", "length"), f"{what}: the finish reason is {finish!r}")
    require(usage is not None, f"{what}: there is no usage")
    assert usage is not None
    num_prompt, num_output, total = usage
    require(num_prompt > 0 and num_output > 0, f"{what}: usage is {usage}")
    require(total == num_prompt + num_output, f"{what}: usage is {usage}")
    passed(what, asked, text)


def command(arguments: Sequence[str | Path], **more: str) -> str:
    """Run a program of this environment; its output. `more` are variables."""
    program, *rest = (str(argument) for argument in arguments)
    path = Path(sys.executable).parent / program
    done = subprocess.run(
        [str(path), *rest], env=os.environ | more, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        fail(f"{program} exited with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout
