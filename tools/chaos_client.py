"""What `tools/chaos.py` needs of a server: start it, ask it many things at once, look at its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FAULTY = str(Path(__file__).with_name("faulty_server.py"))
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Got:
    """One answer as a client saw it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: list[str] = field(default_factory=list)  # what must be equal: texts, tokens, log probabilities, counts
    error: dict[str, Any] | None = None
    is_done: bool = False  # it ended in [DONE], or was a whole body
    has_hung: bool = False
    finishes: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    num_refused: int = 0  # times that it was told to come back later, before it was taken

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.error is None and self.is_done and bool(self.finishes)

    @property
    def is_refused(self) -> bool:
        """Not taken: nothing was begun for it, and it was told when to come back."""
        return self.status == 503 and "retry-after" in self.headers


class LiveServer:
    """A server process; `stop` ends it, `close` whatever is left of it."""

    def __init__(self, engine: Mapping[str, object], server: Mapping[str, object], log: Path) -> None:
        config = json.dumps({"engine": engine, "server": {"port": 0, **server}})
        self.log = log
        with log.open("a") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, FAULTY, config],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "HEADWAY_TEST_FAULTS": "1"},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"the server did not start: {line!r}; its log is {log}"
        address = urlsplit(found.group())
        self.host, self.port = str(address.hostname), address.port or 0

    def engine(self) -> int | None:
        """The engine's process; None while there is none."""
        return min(self.engines(), default=None)

    def engines(self) -> list[int]:
        """Processes of engines that are there now."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"--pulse-fd" in command:
                    found.append(int(pid))
        return sorted(found)

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_children(self) -> int:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(len((task / "children").read_text().split()) for task in tasks)

    def memory_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            status, headers = await _head(reader)
            return status, headers, await reader.read()
        finally:
            writer.close()

    async def free_blocks(self) -> tuple[float, float]:
        """Blocks that are free, and all."""
        page = (await self.get("/metrics"))[2].decode()
        found = [re.findall(rf"^headway_kv_blocks_{name} (\S+)", page, re.MULTILINE)[0] for name in ("free", "total")]
        return float(found[0]), float(found[1])

    async def until_taken(self, num_answers: int) -> None:
        """Wait until so many answers were taken since the start: they wait, are computed or have ended."""
        while True:
            page = (await self.get("/metrics"))[2].decode()
            counts = re.findall(r"^headway_(?:requests_total|replica_requests)\{.*\} (\S+)", page, re.MULTILINE)
            if sum(map(float, counts)) >= num_answers:
                return
            await asyncio.sleep(0.01)

    async def until_ready(self, limit_s: float = 60.0) -> float:
        """Wait until requests are taken; the seconds that took."""
        began = time.monotonic()
        while True:
            try:
                if (await self.get("/ready"))[0] == 200:
                    return time.monotonic() - began
            except OSError:
                pass
            assert time.monotonic() - began < limit_s, "it did not come back"
            await asyncio.sleep(0.02)

    async def ask(self, body: Mapping[str, Any], begun: asyncio.Event | None = None) -> Got:
        """Send a completion and take in all of the answer; `begun` is set with its first event."""
        got = Got()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._ask(body, got, begun)
        except TimeoutError:
            got.has_hung = True
        except (OSError, asyncio.IncompleteReadError, EOFError):
            pass  # the connection broke: neither complete nor an error that was told
        return got

    async def ask_again(self, body: Mapping[str, Any], begun: asyncio.Event | None = None) -> Got:
        """Likewise, and again while it is refused: one that comes when the engine is gone is not taken."""
        num_refused = 0
        while (got := await self.ask(body, begun)).is_refused:
            num_refused += 1
            await asyncio.sleep(0.1)
        got.num_refused = num_refused
        return got

    async def _ask(self, body: Mapping[str, Any], got: Got, begun: asyncio.Event | None) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**22)
        try:
            data = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            got.status, got.headers = await _head(reader)
            if "event-stream" in got.headers.get("content-type", ""):
                await _read_events(reader, got, begun)
            else:
                _take(json.loads(await reader.read()), got)
                got.is_done = True
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split()[1]), headers


async def _read_events(reader: asyncio.StreamReader, got: Got, begun: asyncio.Event | None) -> None:
    last = time.monotonic()
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        got.longest_gap_s, last = max(got.longest_gap_s, now - last), now
        if begun is not None:
            begun.set()
        if line.strip() == b"data: [DONE]":
            got.is_done = True
            return
        _take(json.loads(line[6:]), got)


def _take(said: dict[str, Any], got: Got) -> None:
    if "error" in said:
        got.error = said["error"]
        return
    for choice in said.get("choices", ()):
        got.content.append(f"{choice['index']}:{choice['text']}")
        if choice.get("logprobs"):
            logprobs = choice["logprobs"]
            got.content.append(json.dumps([choice["index"], logprobs["tokens"], logprobs["token_logprobs"]]))
        if choice.get("finish_reason"):
            got.finishes.append(f"{choice['index']}:{choice['finish_reason']}")
    if usage := said.get("usage"):
        got.content.append(f"usage {usage['prompt_tokens']} {usage['completion_tokens']}")


_RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}
LARGE_KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 1.0, "n": 4},
    {"temperature": 0.8, "structured_outputs": {"json": {"type": "array", "minItems": 40, "items": _RECORD}}},
)


def same(one: Got, two: Got) -> bool:
    """Whether two answers are the same, however their events were cut."""
    return one.is_complete and two.is_complete and _whole(one) == _whole(two)


def _whole(got: Got) -> dict[str, Any]:
    texts: dict[str, str] = {}
    probs: dict[int, list[Any]] = {}
    counts: list[str] = []
    for part in got.content:
        if part.startswith("["):
            index, tokens, values = json.loads(part)
            probs.setdefault(index, []).extend(zip(tokens, values, strict=True))
        elif part.startswith("usage "):
            counts.append(part)
        else:
            index_text, _, text = part.partition(":")
            texts[index_text] = texts.get(index_text, "") + text
    return {"texts": texts, "probs": probs, "counts": counts, "finishes": sorted(got.finishes)}


def bodies(
    num: int, max_tokens: int, *, seed: int = 0, streams: bool = True, more: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Requests of every kind: greedy, sampled, with penalties, log probabilities, n answers, stops, least lengths."""
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.9, "stop": [" the", "q"], "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_tokens": max_tokens // 2},
        {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {"40": 1.0}},
        *more,
    )
    words = [
        "The",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "wizards",
        "brew",
        "some",
        "tea",
    ]
    made = []
    for index in range(num):
        prompt = " ".join(words[(index + at * 7) % len(words)] for at in range(4 + index % 9)) + f" {index}:"
        usage = {"stream_options": {"include_usage": True}} if streams else {}
        shared = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed + index, "stream": streams, **usage}
        made.append({**shared, **kinds[index % len(kinds)]})
    return made
