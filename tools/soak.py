"""`scripts/soak`: many clients, many of whom leave; every other answer must be right and nothing may be left behind.

The server is a real `headway serve` on the embedded model, the client is openai's, the expected answers come from
`LLM` in this process. Prints what it found and exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import AsyncOpenAI

from exactness import read_prompts
from headway import LLM, SamplingParams

MAX_TOKENS = 24


def metrics(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(headway_\w+) (\S+)$", text, re.MULTILINE)}


async def ask(client: AsyncOpenAI, prompt: str, seed: int, cut_after: float | None, streams: bool) -> str | None:
    """The answer, or None if this client left."""
    options = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": MAX_TOKENS, "seed": seed}

    async def whole() -> str:
        if not streams:
            return (await client.completions.create(**options)).choices[0].text
        chunks = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    if cut_after is None:
        return await whole()
    try:
        return await asyncio.wait_for(whole(), cut_after)  # done before it meant to leave: an answer like any other
    except TimeoutError:
        return None


async def storm(url: str, plan: list[tuple[str, int, float | None, bool]]) -> list[str | None]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        return list(await asyncio.gather(*(ask(client, *entry) for entry in plan)))


def expected_answers(plan: list[tuple[str, int, float | None, bool]]) -> list[str]:
    with LLM() as llm:
        params = [SamplingParams(max_tokens=MAX_TOKENS, seed=seed) for _, seed, _, _ in plan]
        return [completion.outputs[0].text for completion in llm.generate([entry[0] for entry in plan], params)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cut", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lines = read_prompts()
    plan = [
        (
            rng.choice(lines),
            rng.randrange(1000),
            rng.uniform(0.05, 8.0) if rng.random() < args.cut else None,
            rng.random() < 0.7,
        )
        for _ in range(args.requests)
    ]
    expected = expected_answers(plan)
    command = [str(Path(sys.executable).parent / "headway"), "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    try:
        began = time.monotonic()
        answers = asyncio.run(storm(url, plan))
        took = time.monotonic() - began
        deadline = time.monotonic() + 1.0
        while (now := metrics(url))["headway_kv_blocks_free"] != now["headway_kv_blocks_total"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    kept = [
        (entry, answer, want) for entry, answer, want in zip(plan, answers, expected, strict=True) if answer is not None
    ]
    for (prompt, seed, _, streams), answer, want in kept:
        if answer != want:
            print(f"WRONG: seed {seed} streams {streams} {prompt[:40]!r}\n  got      {answer!r}\n  expected {want!r}")
    right = sum(answer == want for _, answer, want in kept)
    num_cut = args.requests - len(kept)
    print(f"{args.requests} requests in {took:.1f} s, {num_cut} cut off, {right} of {len(kept)} others right")
    print({name: value for name, value in now.items() if name.startswith(("headway_requests", "headway_kv_blocks"))})
    is_clean = now["headway_kv_blocks_free"] == now["headway_kv_blocks_total"]
    is_clean = is_clean and now["headway_requests_running"] == now["headway_requests_waiting"] == 0
    print(f"server exit code {code}; {'nothing left' if is_clean else 'SOMETHING WAS LEFT'}")
    return 0 if right == len(kept) and is_clean and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
