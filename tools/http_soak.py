"""Many requests over real HTTP, a third of them abandoned, some of them malformed: nothing may be left behind.

    tools/http_soak.py [--requests 100000] [--clients 48]

Blocks, requests, descriptors and metric series must be as before, memory grow by at most 1 KB a request, and no status
be above 499 but 503 with Retry-After. The device is made up and fast. Exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadkit import Server, serving

CUT, MALFORMED = 0.30, 0.05
MOST_BYTES = 1024.0  # of memory for each request
BROKEN: tuple[bytes, ...] = (
    b"",
    b"{",
    b'{"prompt":',
    b"[" * 5000,
    b'{"prompt": "a", "n": 10000000000}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": []}',
    b'{"prompt": [-1]}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "a", "model": "none"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "cache_salt": "no blanks"}',
    b"null",
)


@dataclass(slots=True)
class Soaked:
    """What came back, by kind."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what should not have come, the first few
    num_cut: int = 0
    num_broken: int = 0

    @property
    def count(self) -> int:
        return self.statuses.total() + self.num_cut

    def note(self, status: int, top: bytes, is_broken: bool) -> None:
        self.statuses[status] += 1
        is_refusal = status == 503 and b"retry-after:" in top.lower()
        expected = 400 <= status < 500 if is_broken else status == 200
        if not expected and not is_refusal and len(self.wrong) < 20:
            self.wrong.append(f"{'malformed' if is_broken else 'sound'} request: {top[:200]!r}")


def draw(rng: random.Random) -> bytes:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(1, 200) for _ in range(rng.randrange(1, 40))],
        "max_tokens": rng.randrange(1, 24),
        "stream": rng.random() < 0.6,
        "n": 2 if rng.random() < 0.1 else 1,
        "user": f"user-{rng.randrange(10**9)}",
    }
    return json.dumps(body).encode()


async def request(host: str, port: int, rng: random.Random, soaked: Soaked) -> None:
    """One request: whole, malformed, or abandoned at some moment."""
    kind = rng.random()
    is_cut, is_broken = kind < CUT, CUT <= kind < CUT + MALFORMED
    data = rng.choice(BROKEN) if is_broken else draw(rng)
    path = (
        "/v1/completions" if rng.random() < 0.97 else f"/v1/{rng.randrange(10**9)}" if is_broken else "/v1/completions"
    )
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"X-Request-Id: soak-{rng.randrange(10**9)}\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        whole = head.encode() + data
        if is_cut:
            soaked.num_cut += 1
            moment = rng.random()
            writer.write(whole[: rng.randrange(len(whole))] if moment < 0.2 else whole)
            if moment > 0.4:
                await reader.read(rng.choice((1, 200, 600)))
            if rng.random() < 0.5:
                writer.transport.abort()
            return
        soaked.num_broken += is_broken
        writer.write(whole)
        answer = await asyncio.wait_for(reader.read(), 120)
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
        soaked.note(status, answer[:600], is_broken)
        if status == 200 and b"event-stream" in answer[:600].lower() and b"data: [DONE]" not in answer[-40:]:
            soaked.wrong.append(f"a stream without an end: {answer[-200:]!r}")
    finally:
        writer.close()


async def storm(host: str, port: int, count: int, clients: int, soaked: Soaked, seed: int = 0) -> None:
    """So many more requests, by clients that each send one after the other."""
    rng, left = random.Random(seed), iter(range(count))

    async def one() -> None:
        for _ in left:
            await request(host, port, rng, soaked)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())


def leftovers(server: Server) -> tuple[str, int]:
    """What is still held once nothing is asked for, and how many metric series there are."""
    deadline = time.monotonic() + 10
    while True:
        now = server.metrics()
        held = now["headway_kv_blocks_total"] - now["headway_kv_blocks_free"]
        busy = now["headway_requests_running"] + now["headway_requests_waiting"]
        if not held and not busy:
            return "", len(now)
        if time.monotonic() > deadline:
            return f"{held:.0f} blocks, {busy:.0f} requests", len(now)
        time.sleep(0.05)


def slope(points: list[tuple[int, float]]) -> float:
    """Bytes for each request, by least squares over (requests, MB)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return float(1e6 * above / max(1e-9, sum((x - mean_x) ** 2 for x, _ in points)))


def soak(server: Server, count: int, clients: int) -> int:
    soaked, part = Soaked(), max(100, count // 50)
    asyncio.run(storm(server.host, server.port, count // 5, clients, soaked, seed=1))  # pools and caches fill
    _, num_series = leftovers(server)
    num_descriptors, points, begun = server.num_descriptors(), list[tuple[int, float]](), time.monotonic()
    for turn in range(count // part):
        asyncio.run(storm(server.host, server.port, part, clients, soaked, seed=2 + turn))
        points.append((soaked.count, server.memory_mb()))
    seconds, (left, series) = time.monotonic() - begun, leftovers(server)
    grown = slope(points)
    more = server.num_descriptors() - num_descriptors
    print(
        f"{soaked.count} requests, {count / seconds:.0f} a second: {soaked.num_cut} cut, {soaked.num_broken} malformed"
    )
    print(f"statuses {dict(sorted(soaked.statuses.items()))}")
    print(f"left behind: {left or 'nothing'}; descriptors {more:+d}; metric series {series - num_series:+d}")
    print(
        f"memory {points[0][1]:.1f} to {points[-1][1]:.1f} MB, {grown:.0f} bytes a request (at most {MOST_BYTES:.0f})"
    )
    print("\n".join(soaked.wrong))
    return 1 if soaked.wrong or left or more > 2 or series != num_series or grown > MOST_BYTES else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=48)
    args = parser.parse_args()
    pace = {"PACED_BASE_MS": "0.5", "PACED_ROW_MS": "0.01", "PACED_TOKEN_MS": "0.001"}
    with serving("paced", "--num-blocks", "2000", **pace) as server:
        code = soak(server, args.requests, args.clients)
        ended = server.end()
        print(f"server ended with code {ended}")
        return code or ended


if __name__ == "__main__":
    sys.exit(main())
