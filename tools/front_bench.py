"""What a front costs per streamed token: headway's over an engine that ticks, and routers over an upstream that ticks.

    tools/front_bench.py [--streams 3000] [--tokens 150] [--rounds 3]
    tools/front_bench.py --peer smg=VENV/bin/smg --peer vllm-router=VENV/bin/vllm-router
    tools/front_bench.py --tree other=PATH_OF_A_CHECKOUT        the same with the source of another commit
    tools/front_bench.py --heads 1000                           time to the head of an answer instead

Every system runs alone, in turns, with the same clients. Processor time is that of the front's process alone, while all
streams run. The front has the first core for itself; clients, and the engine or the upstream, share the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

TOOLS = Path(__file__).resolve().parent
MODEL = "model"
FRONT_CORE, OTHER_CORE = 0, (os.cpu_count() or 1) - 1


@contextmanager
def running(command: Sequence[str], log: Path, core: int, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process until the context is left; what it prints is in `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environ}
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def said(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """Wait until the process has printed something."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"{process.args!r} did not start:\n{log.read_text()}")


@contextmanager
def headway(tree: Path, folder: Path, tick_ms: float) -> Iterator[tuple[str, int]]:
    log = folder / "front.log"
    command = [sys.executable, str(TOOLS / "ticking_engine.py"), "serve", str(folder / MODEL)]
    environ = {"PYTHONPATH": str(tree / "src"), "TICK_MS": str(tick_ms), "ENGINE_CORE": str(OTHER_CORE)}
    with running(command, log, FRONT_CORE, **environ) as front:
        yield said(front, log, r"serves .* at (http://[\d.]+:\d+)"), front.pid


@contextmanager
def upstream(folder: Path, tick_ms: float) -> Iterator[tuple[str, int]]:
    log = folder / "upstream.log"
    command = [sys.executable, str(TOOLS / "sse_upstream.py"), "--tick-ms", str(tick_ms)]
    with running(command, log, OTHER_CORE) as process:
        yield "http://127.0.0.1:" + said(process, log, r"^(\d+)\s"), process.pid


@contextmanager
def peer(name: str, program: str, folder: Path, tick_ms: float) -> Iterator[tuple[str, int]]:
    """A router over the upstream, as it comes but for the limit on concurrent requests."""
    port, metrics_port = _free_port(), _free_port()
    with upstream(folder, tick_ms) as (url, _):
        options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", url, "--policy", "round_robin"]
        options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        options += ["--max-concurrent-requests", "16384", "--log-level", "error"]
        command = [program, *(["launch"] if name.startswith("smg") else []), *options]
        with running(command, folder / f"{name}.log", FRONT_CORE) as router:
            _wait(f"http://127.0.0.1:{port}/v1/models", router, folder / f"{name}.log")
            yield f"http://127.0.0.1:{port}", router.pid


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if MODEL.encode() in answer.read():
                time.sleep(1)
                return
        time.sleep(0.1)
    raise SystemExit(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")


def load(url: str, pid: int, options: Sequence[str]) -> dict[str, float]:
    command = [
        "taskset",
        "-c",
        str(OTHER_CORE),
        sys.executable,
        str(TOOLS / "stream_clients.py"),
        url,
        "--pid",
        str(pid),
        "--model",
        MODEL,
        *options,
    ]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def summary(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number."""
    return {name: round(median(result[name] for result in results), 3) for name in results[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=150, help="output tokens of each stream")
    parser.add_argument("--tick-ms", type=float, default=100.0, help="between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heads", type=int, default=0, help="time so many heads, one request after the other")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM", help="smg or vllm-router")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH", help="another checkout of headway")
    args = parser.parse_args()
    options = ["--heads", str(args.heads), "--tokens", "1"] if args.heads else ["--streams", str(args.streams)]
    options += [] if args.heads else ["--tokens", str(args.tokens)]
    tick_ms = 0.0 if args.heads else args.tick_ms
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path += [str(TOOLS.parent / "src"), str(TOOLS.parent / "tests" / "support")]
        from tiny_dir import write_tiny_model

        write_tiny_model(folder / MODEL, max_len=16384)
        systems: dict[str, Callable[[], AbstractContextManager[tuple[str, int]]]] = {
            "headway": partial(headway, TOOLS.parent, folder, tick_ms)
        }
        for tree, path in (each.split("=", 1) for each in args.tree):
            systems[tree] = partial(headway, Path(path), folder, tick_ms)
        for kind, path in (each.split("=", 1) for each in args.peer):
            systems[kind] = partial(peer, kind, path, folder, tick_ms)
        if args.heads:
            systems["upstream"] = partial(upstream, folder, tick_ms)
        results: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
        print(f"{os.cpu_count()} cores, {args.rounds} rounds", flush=True)
        for _ in range(args.rounds):
            for system, start in systems.items():
                with start() as (url, pid):
                    results[system].append(load(url, pid, options))
                print(f"{system:12} {json.dumps(results[system][-1])}", flush=True)
        for system, found in results.items():
            print(f"{system:12} median {json.dumps(summary(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
