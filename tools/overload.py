"""Overload by an open loop: 1x, then 10x, then 1x again. `tools/overload.py [--arm declared] [--seconds 15]`

The device is made up (`paced`), so that capacity is known and the client takes nothing from it. 1x is `--rated` of what
a closed loop gets through. The objective is twice the P95 of TTFT and of the whole answer at 0.7x.

    declared   requests declare the objective (slo), and the server has --policy slo: the queue is as long as they allow
    tight      requests declare nothing; --max-queue-s is half of the TTFT objective
    short      --max-queue-s 2
    default    --max-queue-s 10

Goodput is answers within the objective per second. `Retry-After` is compared with when a request was next accepted.
Recovery counts from the end of 10x: until the last request taken before is answered, and until nine in ten requests of
two seconds are within the objective again.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from loadkit import Reply, Server, ask, quantile, serving

ARMS = ("declared", "tight", "short", "default")
SLOTS, WARM_S = 8, 4.0
SIZES = ("--max-num-seqs", str(SLOTS), "--num-blocks", "2000")  # the pool is full of cached prefixes before it counts
ENVIRON = {"PACED_BASE_MS": "10", "PACED_ROW_MS": "0.2", "PACED_TOKEN_MS": "0.05"}


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds to the first byte and to the last."""

    first: float
    total: float

    def holds(self, reply: Reply) -> bool:
        return reply.status == 200 and reply.first <= self.first and reply.total <= self.total

    def declared(self) -> dict[str, Any]:
        return {"slo": {"ttft_ms": 1e3 * self.first, "deadline_ms": 1e3 * self.total}}


def body(rng: random.Random, objective: Objective | None = None) -> dict[str, Any]:
    prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(64, 257))]
    declared = {} if objective is None else objective.declared()
    return {"prompt": prompt, "max_tokens": rng.randrange(16, 65), "temperature": 0, "stream": True, **declared}


async def closed_loop(server: Server, clients: int, seconds: float) -> float:
    """Answers per second that so many clients get, one after the other."""
    rng, end = random.Random(1), time.monotonic() + seconds
    done: list[float] = []

    async def one() -> None:
        while time.monotonic() < end:
            reply = await ask(server, body(rng))
            if reply.status == 200:
                done.append(time.monotonic())

    await asyncio.gather(*(one() for _ in range(clients)))
    inside = [at for at in done if end - seconds / 2 <= at <= end]
    return len(inside) / (seconds / 2)


async def open_loop(
    server: Server, rate: float, seconds: float, rng: random.Random, objective: Objective | None = None
) -> list[asyncio.Task[Reply]]:
    """Requests at random times, whatever became of the others; they may go on after the end."""
    tasks: list[asyncio.Task[Reply]] = []
    at = begun = time.monotonic()
    while True:
        at += rng.expovariate(rate)
        if at - begun > seconds:
            return tasks
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.create_task(ask(server, body(rng, objective))))


async def calibrate(server: Server, rated: float, seconds: float) -> tuple[float, Objective]:
    """Requests per second at 1x, and the objective."""
    await closed_loop(server, 2 * SLOTS, WARM_S)  # the cost model learns
    rate = rated * await closed_loop(server, 2 * SLOTS, seconds)
    light = await asyncio.gather(*await open_loop(server, 0.7 * rate, seconds, random.Random(2)))
    good = [reply for reply in light if reply.status == 200]
    return rate, Objective(2 * quantile([r.first for r in good], 0.95), 2 * quantile([r.total for r in good], 0.95))


@dataclass(slots=True)
class Run:
    """The three phases of one arm."""

    before: list[Reply]
    during: list[Reply]
    after: list[Reply]
    dropped: float  # when the load went down
    memory: tuple[float, float]  # MB before, and at most


async def storm(server: Server, rate: float, seconds: float, objective: Objective | None) -> Run:
    rng, peak = random.Random(3), 0.0
    begun_with = server.memory_mb()
    stop = asyncio.Event()

    async def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, server.memory_mb())
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    phases = [await open_loop(server, rate, seconds, rng, objective)]
    phases.append(await open_loop(server, 10 * rate, seconds, rng, objective))
    dropped = time.monotonic()
    phases.append(await open_loop(server, rate, 2 * seconds, rng, objective))
    before, during, after = [list(await asyncio.gather(*tasks)) for tasks in phases]
    stop.set()
    await watching
    return Run(before, during, after, dropped, (begun_with, peak))


def honesty(run: Run) -> float:
    """The share of refusals whose time to come back is within twice of when a request was next taken."""
    taken = sorted(reply.at for reply in [*run.during, *run.after] if reply.status == 200)
    found = []
    for reply in run.during:
        said, after = reply.retry_after, [at for at in taken if at > reply.at]
        if reply.status == 200 or said is None or not after:
            continue
        true = min(60.0, max(1.0, after[0] - reply.at))
        found.append((said / 1.2 / true >= 0.5 and said / 0.8 / true <= 2.0) or 0.5 <= said / true <= 2.0)
    return sum(found) / len(found) if found else math.nan


def latency_back(run: Run, objective: Objective) -> float:
    """Seconds after the drop from which on nine in ten of the requests of two seconds hold the objective."""
    for tenth in range(1000):
        since = run.dropped + tenth / 10
        window = [reply for reply in run.after if since <= reply.at < since + 2.0]
        if window and sum(map(objective.holds, window)) >= 0.9 * len(window):
            return tenth / 10
    return math.inf


def report(arm: str, rate: float, objective: Objective, run: Run, seconds: float, calm: float) -> bool:
    at_1x, at_10x = (sum(map(objective.holds, replies)) / seconds for replies in (run.before, run.during))
    peak = max(calm, at_1x)
    ok = [reply for reply in run.during if reply.status == 200]
    shed = [reply for reply in run.during if reply.status == 429 and b"in the queue" in reply.body]
    refused = [reply for reply in run.during if reply.status in (429, 503) and reply not in shed]
    strange = [reply for reply in [*run.before, *run.during, *run.after] if reply.status not in (200, 429, 503)]
    p50, p95 = (quantile([reply.first for reply in ok], q) for q in (0.5, 0.95))
    p99 = 1e3 * quantile([reply.total for reply in refused], 0.99)
    answered = max((reply.at + reply.total - run.dropped for reply in ok), default=0.0)
    grown = 100 * (run.memory[1] / run.memory[0] - 1)
    print(
        f"--- {arm}: 1x = {rate:.1f} requests/s; objective TTFT {objective.first:.3f} s, whole {objective.total:.2f} s"
    )
    print(f"goodput 1x {at_1x:.1f}/s, 10x {at_10x:.1f}/s = {100 * at_10x / peak:.0f} % of peak (>= 90)")
    print(
        f"10x: {len(run.during)} sent, {len(refused)} refused, {len(ok)} answered; TTFT P50 {p50:.2f}, P95 {p95:.2f} s"
    )
    print(f"refusal P99 {p99:.1f} ms (<= 50); without Retry-After {sum(r.retry_after is None for r in refused)} (0)")
    print(f"Retry-After within 2x: {100 * honesty(run):.0f} % of refusals; memory {grown:+.1f} % (<= 5)")
    print(f"accepted and shed in the queue, as --policy slo does: {len(shed)}; other statuses {len(strange)} (0)")
    back = latency_back(run, objective)
    print(f"recovery: overload answered after {answered:.1f} s, latency back after {back:.1f} s", flush=True)
    return not strange and p99 <= 50 and grown <= 5 and at_10x >= 0.9 * peak


async def one_arm(arm: str, rate: float, objective: Objective, seconds: float) -> bool:
    options = {
        "declared": ["--policy", "slo"],
        "tight": ["--max-queue-s", f"{objective.first / 2:.3f}"],
        "short": ["--max-queue-s", "2"],
        "default": [],
    }[arm]
    with serving("paced", *SIZES, *options, **ENVIRON) as server:
        await closed_loop(server, SLOTS, WARM_S)
        calm = await asyncio.gather(*await open_loop(server, 0.7 * rate, seconds / 2, random.Random(4)))
        level = sum(map(objective.holds, calm)) / (seconds / 2)
        run = await storm(server, rate, seconds, objective if arm == "declared" else None)
        return report(arm, rate, objective, run, seconds, level)


async def measure(arms: list[str], seconds: float, rated: float) -> int:
    with serving("paced", *SIZES, **ENVIRON) as server:
        rate, objective = await calibrate(server, rated, seconds)
    good = [await one_arm(arm, rate, objective, seconds) for arm in arms]
    return 0 if all(good) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, action="append", help="may be given several times; all if not given")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--rated", type=float, default=0.85, help="what 1x is of the closed loop's throughput")
    args = parser.parse_args()
    return asyncio.run(measure(args.arm or list(ARMS), args.seconds, args.rated))


if __name__ == "__main__":
    sys.exit(main())
