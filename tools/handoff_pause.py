"""What a pull of blocks during later chunks could save: how long a request waits for its KV, beside its prefill.

    python tools/handoff_pause.py [--rounds 5] [--tokens 1000 4000] [--way unix|tcp] [--touch]

Two engines, one core each, bundled model: one computes a prompt, the other goes on. The time to the first token is that
of the prefill; between the first token and the second one all blocks cross, then one step is computed. Beside it the
time between later tokens. The difference of the two is the most that any pull ahead could save. Blocks come to memory
of the pool that was never used; with `--touch` (`--touch-kv` of an engine) it is taken at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from headway.cluster.client import FleetClient
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.values.params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def times(client: FleetClient, id: int, num_tokens: int) -> list[float]:
    """Seconds from the request to its first token, and between each two tokens."""
    prompt = [(id * 7919 + i * 31) % 40_000 for i in range(num_tokens)]
    last, found = time.perf_counter(), []
    async for output in client.submit(Submit(id, prompt, PARAMS)):
        for _ in output.tokens:
            now = time.perf_counter()
            found.append(now - last)
            last = now
    return found


async def run(rounds: int, lengths: Sequence[int], way: str, *, touch: bool = False) -> None:
    config = EngineConfig.of(
        threads=1, touch_kv=touch, role="prefill,decode", kv_memory_gb=1.5, max_model_len=max(lengths) + 64
    )
    client = FleetClient.start(config, num_replicas=2, log_level="error")
    await client.connect()
    try:
        await client.ready()
        for core, replica in enumerate(client.replicas):
            pin(replica.engine.pid or 0, core % (os.cpu_count() or 1))
            assert replica.engine.info is not None
            addresses = [each for each in replica.engine.info.fetch_at.split(",") if each.startswith(way)]
            replica.engine.info = replace(replica.engine.info, fetch_at=",".join(addresses))
        await times(client, 1, 200)
        id = 1
        for num_tokens in lengths:
            firsts, pauses, rests = [], [], []
            for _ in range(rounds):
                id += 1
                first, pause, *rest = await times(client, id, num_tokens)
                firsts.append(first)
                pauses.append(pause)
                rests.append(median(rest))
            saved = median(pauses) - median(rests)
            print(
                f"{way}, {num_tokens} tokens: prefill {median(firsts):.3f} s, to the second token "
                f"{median(pauses) * 1e3:.1f} ms, between later ones {median(rests) * 1e3:.1f} ms: at most "
                f"{saved * 1e3:.1f} ms to save, {saved / (median(firsts) + median(pauses)):.1%} of the way to it"
            )
        print(f"{(await client.stats()).tokens_from_peers} tokens fetched")
    finally:
        await client.close(1.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--way", choices=("unix", "tcp"), default="unix")
    parser.add_argument("--touch", action="store_true", help="pools whose memory is taken at the start")
    args = parser.parse_args(argv)
    asyncio.run(run(args.rounds, args.tokens, args.way, touch=args.touch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
