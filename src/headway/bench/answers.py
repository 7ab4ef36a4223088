"""Collects a model's own answers as a request log, on which a ranker is trained and measured.

Prompts come from text, JSON lines or JSON datasets; each goes through the model's chat template. An existing log is
continued, so a long collection can be made in several runs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import ConfigError
from headway.rank.log import Entry, RequestLog, read_log
from headway.values.params import SamplingParams

KEYS = ("prompt", "question", "instruction", "query", "turns", "messages", "text")
_GROUP = 64  # prompts answered together


class Reply(NamedTuple):
    """The prompt as tokens, and the number of tokens of the answer."""

    tokens: list[int]
    num_output: int
    finish: str


Answer = Callable[[Sequence[str]], Sequence[Reply]]
"""Sends several prompts to a model at once."""


class Asked(NamedTuple):
    """A prompt and the file it is from, which is its route."""

    text: str
    route: str


def read_prompts(paths: Sequence[Path], seed: int) -> list[Asked]:
    """The prompts of all files, shuffled together."""
    asked: list[Asked] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
            values = _values(path, text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"cannot read prompts from {path}: {error}") from error
        found = [prompt for value in values for prompt in _prompts(value) if prompt.strip()]
        if not found:
            raise ConfigError(f"{path} has no prompts; allowed: lines of text, or JSON with one of {', '.join(KEYS)}")
        asked += [Asked(prompt, path.stem) for prompt in found]
    random.Random(seed).shuffle(asked)
    return asked


def _values(path: Path, text: str) -> list[Any]:
    if path.suffix == ".json":
        return [json.loads(text)]
    lines = [line for line in text.splitlines() if line.strip()]
    return [json.loads(line) for line in lines] if path.suffix == ".jsonl" else list(lines)


def _prompts(value: Any) -> Iterator[str]:
    """Every prompt in a value: a text, a list of such, a list of messages, or an object with one by a known name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if value and isinstance(value[0], dict) and "content" in value[0]:
            yield "\n\n".join(str(message["content"]) for message in value if message.get("role") != "assistant")
        else:
            for item in value:
                yield from _prompts(item)
    elif isinstance(value, dict):
        yield from _of_object(value)


def _of_object(value: dict[str, Any]) -> Iterator[str]:
    if "qas" in value:  # SQuAD's form: questions about one text
        for question in value["qas"]:
            yield f"{value['context']}\n\n{question['question']}"
        return
    if "data" in value or "paragraphs" in value:
        yield from _prompts(value.get("data") or value["paragraphs"])
        return
    key = next((key for key in KEYS if key in value), None)
    if key == "turns":
        yield str(value["turns"][0])
    elif key == "instruction":
        cases = value.get("instances") or [{}]
        yield f"{value['instruction']}\n\n{cases[0].get('input', '')}".strip()
    elif key is not None:
        yield from _prompts(value[key])


def collect(
    answer: Answer,
    asked: Sequence[Asked],
    path: Path,
    params: SamplingParams,
    *,
    deadline: float,
    on_progress: Callable[[int], None],
) -> int:
    """Answer prompts missing from the log until `time.monotonic` reaches a limit; return how many entries it has."""
    num_done = len(read_log(path)) if path.exists() else 0
    log = RequestLog(path)
    try:
        while num_done < len(asked) and time.monotonic() < deadline:
            group = asked[num_done : num_done + _GROUP]
            replies = answer([one.text for one in group])
            for at, (prompt, reply) in enumerate(zip(group, replies, strict=True), num_done):
                log.write(
                    Entry(
                        tokens=reply.tokens,
                        max_tokens=params.max_tokens,
                        num_output=reply.num_output,
                        finish=reply.finish,
                        at=float(at),
                        route=prompt.route,
                        temperature=params.temperature,
                    )
                )
            num_done += len(group)
            on_progress(num_done)
    finally:
        log.close()
    return num_done
