"""A server process over a small model, and a client that costs little: what the load tools share.

The server is `headway serve` as anyone starts it; only its model is small (`tiny`, which computes) or its device is
made up (`paced`, which waits). The client opens a connection for each request, so that nothing is shared between them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [ROOT / "src", ROOT / "tests" / "support", ROOT / "tools"]


@dataclass(slots=True)
class Reply:
    """What came of one request. Times are seconds from its sending; NaN if it never came that far."""

    at: float
    status: int = 0
    first: float = float("nan")
    total: float = float("nan")
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after(self) -> float | None:
        ms, whole = self.headers.get("retry-after-ms"), self.headers.get("retry-after")
        return float(ms) / 1e3 if ms else None if whole is None else float(whole)

    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """`headway serve` in a process of its own; its log is in `log`."""

    def __init__(self, folder: Path, options: Sequence[str], environ: Mapping[str, str]) -> None:
        self.log = folder / "server.log"
        paths = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
        code = "import sys; from headway.cli.main import main; sys.exit(main())"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", *options, "--port", "0", "--cache-dir", str(folder / "cache")],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **environ},
            )
        self.url = self._wait()
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)

    def _wait(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"serves .* at (http://[\d.]+:\d+)", self.log.read_text())
            if found:
                return found[1]
            time.sleep(0.05)
        raise SystemExit(f"the server did not start:\n{self.log.read_text()}")

    def pids(self) -> list[int]:
        """Its own and those of its children."""
        pids, at = [self.process.pid], 0
        while at < len(pids):
            with suppress(OSError):
                for task in Path(f"/proc/{pids[at]}/task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
            at += 1
        return pids

    def memory_mb(self) -> float:
        """Resident memory of all its processes."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return total * os.sysconf("SC_PAGE_SIZE") / 1e6

    def num_descriptors(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids())

    def metrics(self, key: str = "") -> dict[str, float]:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"})
        text = urllib.request.urlopen(request, timeout=30).read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(kind: str, *options: str, **environ: str) -> Iterator[Server]:
    """A server over a model in a folder of its own; `kind` is tiny or paced."""
    sys.path += [str(path) for path in PATHS if str(path) not in sys.path]
    from tiny_dir import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", max_len=16384)
        device = ["--device", "paced:PLUGIN"] if kind == "paced" else ["--threads", "1"]
        server = Server(folder, [str(folder / "model"), *device, "--log-level", "warning", *options], environ)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.end()


async def ask(server: Server, body: Mapping[str, Any], *, key: str = "", timeout_s: float = 120.0) -> Reply:
    """One completion, streamed or not; whatever goes wrong on the way is a status of 0."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    reply = Reply(time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(head.encode() + data)
            top = await reader.readuntil(b"\r\n\r\n")
            reply.first = time.monotonic() - reply.at
            lines = top.decode("latin-1").split("\r\n")
            reply.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
            reply.body = await reader.read()
            reply.status = int(lines[0].split()[1])
            reply.total = time.monotonic() - reply.at
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return reply


def quantile(values: Sequence[float], q: float) -> float:
    found = sorted(values)
    return found[min(len(found) - 1, int(q * len(found)))] if found else float("nan")
