"""A prompt before and after its server was killed: how much of its KV comes from disk, and how soon its first token.

    python tools/tier_restart.py [--rounds 3] [--tokens 1000] [--model NAME]

Starts `headway serve` with a folder for KV, sends a prompt that is new to it, kills server and engine with SIGKILL,
starts again and sends it once more. Both times the server has answered another prompt before. Then the same prompt to
a server with another KV layout and to one with another block size, which must find nothing. Exits 1 if a bar is missed:
95 % of the tokens from disk, a fifth of the time, the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Answered(NamedTuple):
    text: str
    num_prompt: int
    num_cached: int
    ttft_s: float


@contextmanager
def serving(folder: str, model: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that is ready; killed at the end, with whatever it started."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "headway.cli.main", "serve", model, "--port", str(port), "--log-level", "error"]
    command += ["--kv-disk-bytes", str(2 << 30), "--kv-disk-dir", folder, *options]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield url, process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Server and engine, at once: neither has time to store anything."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=False)
    for pid in (*map(int, children.stdout.split()), process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def ask(url: str, prompt: Sequence[int], max_tokens: int = 8) -> Answered:
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"model": "m", "stream_options": {"include_usage": True}, "ignore_eos": True}
    body["model"] = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    began, first, tokens, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = first or time.perf_counter() - began
                tokens.append(choice["text"])
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answered(
        "".join(tokens),  # how many come in one event says nothing
        usage["prompt_tokens"],
        cached,
        first,
    )


def metric(url: str, name: str) -> float:
    page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name}_total "))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args(argv)
    ratios, is_good = [], True
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            prompt = [100 + (37 * i + 1009 * number) % 40_000 for i in range(args.tokens)]
            other = [100 + (31 * i + 7 * number) % 40_000 for i in range(args.tokens)]
            with serving(folder, args.model) as (url, _):
                ask(url, other)
                cold = ask(url, prompt)
                time.sleep(0.5)  # what was computed is being stored
            with serving(folder, args.model) as (url, _):
                ask(url, other[::-1])
                warm = ask(url, prompt)
                from_disk = metric(url, "headway_tokens_from_tier")
            share, ratio = warm.num_cached / warm.num_prompt, warm.ttft_s / cold.ttft_s
            ratios.append(ratio)
            print(
                f"cold {cold.ttft_s * 1e3:.0f} ms ({cold.num_cached} cached), then {warm.ttft_s * 1e3:.0f} ms, "
                f"ratio {ratio:.3f}; {share:.1%} of {warm.num_prompt} tokens cached, {from_disk:.0f} from disk; "
                f"{'the same tokens' if warm.text == cold.text else 'OTHER TOKENS'}"
            )
            is_good = is_good and share >= 0.95 and warm.text == cold.text and cold.num_cached == 0
        for options in (("--kv-dtype", "float32"), ("--block-size", "32"), ("--dtype", "bfloat16")):
            with serving(folder, args.model, *options) as (url, _):
                got = ask(url, prompt)
            print(f"with {' '.join(options)}: {got.num_cached} cached tokens")
            is_good = is_good and got.num_cached == 0
    ratio = statistics.median(ratios)
    print(f"median ratio of the times to the first token: {ratio:.3f}")
    return 0 if is_good and ratio <= 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
