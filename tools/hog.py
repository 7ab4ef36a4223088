"""One request of 1,024 answers beside six clients of other tenants: `tools/hog.py [--fair] [--same-tenant]`.

Each client asks again and again and notes its TTFT, first alone, then beside the hog (64 prompts x 16 answers). The P95
with it may be twice that without. The device is made up (`paced`); exits 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from loadkit import Server, ask, quantile, serving

NUM_VICTIMS, MOST = 6, 2.0
NAMES = ["hog", *(f"victim{i}" for i in range(NUM_VICTIMS))]
KEYS = "".join(f'[tenants.{name}]\nkeys = ["sk-{name}"]\n' for name in NAMES)
ENVIRON = {"PACED_BASE_MS": "10", "PACED_ROW_MS": "0.1", "PACED_TOKEN_MS": "0.05"}


async def victims(server: Server, keys: list[str], seconds: float) -> list[float]:
    """The TTFTs of clients that ask, wait for the whole answer, pause and ask again."""
    end, found = time.monotonic() + seconds, list[float]()

    async def one(key: str, rng: random.Random) -> None:
        await asyncio.sleep(rng.random())
        while time.monotonic() < end:
            prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(128, 513))]
            reply = await ask(server, {"prompt": prompt, "max_tokens": 24, "stream": True}, key=key)
            found.append(reply.first if reply.status == 200 else float("inf"))
            await asyncio.sleep(rng.uniform(0.0, 0.5))

    await asyncio.gather(*(one(key, random.Random(key)) for key in keys))
    return found


async def hog(server: Server) -> int:
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 200) for _ in range(16)] for _ in range(64)]
    body = {"prompt": prompts, "n": 16, "max_tokens": 8000, "temperature": 1, "stream": True}
    return (await ask(server, body, key="sk-hog", timeout_s=600)).status


async def measure(server: Server, keys: list[str], seconds: float) -> tuple[list[float], list[float]]:
    await victims(server, keys, 3.0)
    alone = await victims(server, keys, seconds)
    hogging = asyncio.create_task(hog(server))
    while server.metrics("sk-hog")["headway_requests_running"] < 64:
        await asyncio.sleep(0.1)
    beside = await victims(server, keys, seconds)
    assert server.metrics("sk-hog")["headway_requests_running"] > 32, "the hog has no slots"
    hogging.cancel()
    return alone, beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fair", action="store_true", help="the server has --fair")
    parser.add_argument("--same-tenant", action="store_true", help="the clients have the hog's key")
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    keys = ["sk-hog" if args.same_tenant else f"sk-{name}" for name in NAMES[1:]]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "keys.toml"
        file.write_text(KEYS)
        file.chmod(0o600)
        options = ["--keys", str(file), "--num-blocks", "60000", *(["--fair"] if args.fair else [])]
        with serving("paced", *options, **ENVIRON) as server:
            alone, beside = asyncio.run(measure(server, keys, args.seconds))
    ratio = quantile(beside, 0.95) / quantile(alone, 0.95)
    for what, times in (("alone", alone), ("beside the hog", beside)):
        p50, p95 = quantile(times, 0.5), quantile(times, 0.95)
        print(f"{what:15} {len(times):4} requests, TTFT P50 {1e3 * p50:.0f} ms, P95 {1e3 * p95:.0f} ms")
    print(f"P95 {ratio:.2f} times (at most {MOST:g})")
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
