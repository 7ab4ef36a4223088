"""Sends broken and random bodies to a server and checks every answer.

    tools/fuzz_http.py                                  20,000 bodies to a `headway serve` that is started for it
    tools/fuzz_http.py --cases 500 --seed 7
    tools/fuzz_http.py --url http://127.0.0.1:8000

Half of the bodies are valid ones with bytes changed, half have random values of random types in random places. An
answer is wrong if it is a 5xx other than a 503 with Retry-After, if an error is not an OpenAI error object or tells an
address or a traceback, or if a body that is no JSON is accepted. In the end the server must be ready and all its blocks
free. Prints the seed and every wrong answer; exit status 1 if there was one.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

SERVE = "import sys; from headway.cli.main import main; sys.exit(main())"
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hé \U0001f600"}]},
]
SAMPLING = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 7,
    "stop": ["x", "yz"],
    "logit_bias": {"5": 1.5},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop_token_ids": [3],
    "cache_salt": "a",
    "priority": 1,
    "service_tier": "flex",
    "slo": {"ttft_ms": 5000, "itl_ms": 500},
    "user": "me",
    "min_tokens": 1,
    "ignore_eos": False,
}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": 2, **SAMPLING}),
    ("/v1/chat/completions", {"messages": TALK, "max_completion_tokens": 1}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "logprobs": 1, **SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1, "stream": False}),
    ("/tokenize", {"text": "hello", "add_special_tokens": False}),
    ("/tokenize", {"messages": TALK}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/cache/lookup", {"tokens": [5, 6, 7], "cache_salt": "a"}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**53 + 1, -(2**63), 2**63, 2**64, 10**400),
    *(0.0, -0.0, 1e-300, 1e300, 0.5, 1.0),
    *("", "x", "\0", "\u202e", "é" * 300, "NaN", "1", "[]", "\U0001f469\u200d\U0001f4bb", "x" * 5000),
    *("auto", "user", "none"),
    *([], {}, [[]], [None], [{}], {"": None}, {"a": {"b": []}}, [1, "a", None], [[1], ["a"]], {"5": 1}),
    {"type": "text"},
]  # fmt: skip
BYTES = [
    b"NaN",
    b"Infinity",
    b"-",
    b"1e999",
    b"\xff",
    b"\x00",
    b'"',
    b"\\",
    b"\\ud800",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"9" * 400,
]
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|/src/headway")


def mutated(draw: random.Random, data: bytes) -> bytes:
    """The bytes with one to four changes."""
    for _ in range(draw.randint(1, 4)):
        at, to = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
        to = min(to, at + draw.choice((1, 4, 64)))
        change = draw.randrange(6)
        if change == 0:
            data = data[:at] + draw.choice(BYTES) + data[at:]
        elif change == 1:
            data = data[:at] + data[to:]
        elif change == 2:
            data = data[:at] + data[at:to] * draw.choice((2, 50)) + data[to:]
        elif change == 3:
            data = data[:at]
        elif change == 4:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(to - at)) + data[to:]
        else:
            data = data[:at] + draw.choice(BYTES) + data[to:]
    return data


def replaced(draw: random.Random, value: Any) -> Any:
    """The value with one to three parts of it replaced, added or left out."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        part = value
        while True:
            keys = list(part) if isinstance(part, dict) else list(range(len(part)))
            if not keys or draw.random() < 0.1:
                if isinstance(part, dict):
                    part[draw.choice(("", "a", "tools", "model", "n", "echo"))] = draw.choice(VALUES)
                else:
                    part.append(draw.choice(VALUES))
                break
            key = draw.choice(keys)
            if isinstance(part[key], dict | list) and draw.random() < 0.6:
                part = part[key]
                continue
            if draw.random() < 0.15:
                del part[key]
            else:
                part[key] = copy.deepcopy(draw.choice(VALUES))
            break
    return value


def cases(draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    for index in range(count):
        path, seed = draw.choice(SEEDS)
        if index % 2:
            yield path, json.dumps(replaced(draw, seed)).encode("utf-8", "surrogatepass")
        else:
            yield path, mutated(draw, json.dumps(seed).encode())


def is_json(data: bytes) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(data.decode(), parse_constant=refuse, parse_int=lambda digits: 0)
    except (ValueError, RecursionError):
        return False
    return True


def fault(body: bytes, status: int, headers: http.client.HTTPMessage, answer: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if status < 400:
        return None if is_json(body) else "a body that is no JSON was accepted"
    if status >= 500 and not (status == 503 and headers["retry-after"]):
        return f"{status}"
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return "the answer is no error object"
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["message"], str):
        return "the error object has other fields"
    return "it tells too much" if LEAK.search(error["message"]) else None


class Client:
    """One connection, opened again whenever the server has closed it."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"content-type": "application/json"} if body is not None else {}
        for is_last in (False, True):
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                return response.status, response.headers, response.read()
            except (http.client.HTTPException, ConnectionError):
                self._connection.close()
                if is_last:
                    raise
        raise AssertionError

    def close(self) -> None:
        self._connection.close()


def run(url: str, count: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Send so many bodies; statuses and what was wrong."""
    draw = random.Random(seed)
    client = Client(url)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    for path, body in cases(draw, count):
        status, headers, answer = client.ask("POST", path, body)
        statuses[status] += 1
        wrong = fault(body, status, headers, answer)
        if wrong is not None:
            faults.append(f"{wrong}: POST {path} {body[:2000]!r} -> {status} {answer[:300]!r}")
    faults += left_over(client)
    client.close()
    return statuses, faults


def left_over(client: Client) -> list[str]:
    """What a server that is asked nothing more still holds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        page = client.ask("GET", "/metrics")[2].decode()
        free, total = (
            re.search(rf"^headway_kv_blocks_{name} (\S+)$", page, re.MULTILINE) for name in ("free", "total")
        )
        if free is not None and total is not None and free[1] == total[1]:
            return [] if client.ask("GET", "/ready")[0] == 200 else ["the server is not ready any more"]
        time.sleep(0.05)
    return ["blocks were not given back"]


@contextmanager
def started() -> Iterator[str]:
    # A short context: bodies that come to ask for much do not take minutes.
    command = [sys.executable, "-c", SERVE, "serve", "--port", "0", "--log-level", "error", "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start")
            yield found.group()
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    begun = time.monotonic()
    if given.url:
        statuses, faults = run(given.url, given.cases, given.seed)
    else:
        with started() as url:
            statuses, faults = run(url, given.cases, given.seed)
    for line in faults:
        print(line)
    said = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    print(f"seed {given.seed}: {given.cases} bodies in {time.monotonic() - begun:.0f} s: {said}; {len(faults)} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
