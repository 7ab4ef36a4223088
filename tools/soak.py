"""`scripts/soak`: many clients, many of which leave; every other answer must be right and nothing may be left behind.

The server is a real `headway serve` on the embedded model, the client is openai's, the expected answers come from
`LLM` in this process. Both sides must compute with the same kernels, library, source tree and number formats, or no
run begins. Prints a line for each run, wrong answers by prompt and by shared block, and exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from exactness import read_prompts
from headway import LLM, SamplingParams
from headway.kv.prefix import chain_keys, chain_seed

MAX_TOKENS = 24


class Ask(NamedTuple):
    prompt: str
    seed: int
    cut_after: float | None  # seconds until this client leaves
    streams: bool


class Wrong(NamedTuple):
    ask: Ask
    got: str
    expected: str


@dataclass(slots=True)
class Outcome:
    """One run, as a line of the table."""

    arm: str
    seed: int
    num_asked: int = 0
    num_cut: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    seconds: float = 0.0
    preemptions: int = 0
    left: str = ""  # what the server did not give back
    code: int | None = None  # of the server's exit

    @property
    def is_good(self) -> bool:
        return not self.wrong and not self.left and self.code == 0

    def line(self) -> str:
        num_kept = self.num_asked - self.num_cut
        right = f"{num_kept - len(self.wrong)} of {num_kept}"
        cells = (self.arm, self.seed, self.num_cut, right, self.preemptions, f"{self.seconds:.0f}")
        return f"| {' | '.join(map(str, cells))} | {self.left or 'nothing'} | {self.code} |"


HEADER = "| arm | seed | cut off | others right | preempted | s | left behind | exit |\n" + "|---" * 8 + "|"


def draw_asks(seed: int, count: int, cut: float, prompts: Sequence[str]) -> list[Ask]:
    """The clients of one run; equal seeds draw equal ones."""
    rng = random.Random(seed)
    return [
        Ask(
            rng.choice(prompts),
            rng.randrange(1000),
            rng.uniform(0.05, 8.0) if rng.random() < cut else None,
            rng.random() < 0.7,
        )
        for _ in range(count)
    ]


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """What two sides do not compute with alike; a fact that one side does not report counts."""
    return [
        f"{name}: {ours.get(name, 'not reported')!r} here, {theirs.get(name, 'not reported')!r} in the server"
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def by_prompt(wrong: Sequence[Wrong], asked: Sequence[Ask]) -> list[str]:
    """For each prompt with a wrong answer: how many of its answers are, and what they say."""
    totals = Counter(ask.prompt for ask in asked)
    lines = []
    for prompt, count in Counter(entry.ask.prompt for entry in wrong).most_common():
        lines.append(f"{count} of {totals[prompt]} answers to {prompt[:60]!r}")
        for ask, got, expected in (entry for entry in wrong if entry.ask.prompt == prompt):
            same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), "its end")
            lines.append(f"  seed {ask.seed}, {'streamed' if ask.streams else 'whole'}, differs at character {same}")
            lines += [f"    got      {got!r}", f"    expected {expected!r}"]
    return lines


def by_block(wrong: Sequence[Wrong], asked: Sequence[Ask], keys_of: Callable[[str], Sequence[bytes]]) -> list[str]:
    """For each block of prompts with wrong answers that several requests share: how many of those are wrong."""
    totals = Counter(key for ask in asked for key in keys_of(ask.prompt))
    found = Counter(key for entry in wrong for key in keys_of(entry.ask.prompt))
    place = {key: i for ask in asked for i, key in enumerate(keys_of(ask.prompt))}
    lines = [
        f"block {place[key]} with key {key.hex()[:8]}: {count} of {totals[key]} wrong"
        for key, count in sorted(found.items(), key=lambda item: (-item[1], place[item[0]]))
        if totals[key] > 1
    ]
    alone = sum(not any(totals[key] > 1 for key in keys_of(entry.ask.prompt)) for entry in wrong)
    return [*lines, *([f"{alone} wrong that share no full block"] if alone else [])]


class Reference:
    """The engine in this process: what each answer must be."""

    def __init__(self, llm: LLM, is_greedy: bool) -> None:
        self._llm = llm
        self._temperature = 0.0 if is_greedy else 1.0
        self._keys: dict[str, list[bytes]] = {}

    @property
    def temperature(self) -> float:
        return self._temperature

    def facts(self) -> dict[str, str]:
        return self._llm.info.computes_with()

    def answers(self, asks: Sequence[Ask]) -> list[str]:
        params = [SamplingParams(max_tokens=MAX_TOKENS, seed=ask.seed, temperature=self._temperature) for ask in asks]
        return [completion.outputs[0].text for completion in self._llm.generate([ask.prompt for ask in asks], params)]

    def keys(self, prompt: str) -> list[bytes]:
        """Of the prompt's full blocks: equal keys are one block in the cache."""
        if prompt not in self._keys:
            tokens = self._llm.tokenizer.encode(prompt)
            self._keys[prompt] = list(chain_keys(tokens, self._llm.info.block_size, chain_seed("soak")))
        return self._keys[prompt]


def metrics(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(headway_\w+) (\S+)$", text, re.MULTILINE)}


def request_of(ask: Ask, temperature: float) -> dict[str, Any]:
    """Every sampling value is named, as the server would fill in the model's own for one that is not."""
    return {
        "model": "smollm2-135m-instruct", "prompt": ask.prompt, "max_tokens": MAX_TOKENS, "seed": ask.seed,
        "temperature": temperature, "top_p": 1.0,
        "extra_body": {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    }  # fmt: skip


async def ask_one(client: AsyncOpenAI, ask: Ask, temperature: float) -> str | None:
    """The answer, or None if this client left."""
    options = request_of(ask, temperature)

    async def whole() -> str:
        if not ask.streams:
            return str((await client.completions.create(**options)).choices[0].text)
        chunks = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    if ask.cut_after is None:
        return await whole()
    try:
        return await asyncio.wait_for(whole(), ask.cut_after)  # done before it was to leave: an answer like any other
    except TimeoutError:
        return None


async def storm(url: str, asks: Sequence[Ask], temperature: float) -> list[str | None]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        return list(await asyncio.gather(*(ask_one(client, ask, temperature) for ask in asks)))


class Served:
    """A server process; its log is kept, and shown where it matters."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [str(Path(sys.executable).parent / "headway"), "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.url = next(found[0] for line in self.process.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
        self.log: list[str] = []
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stdout,), daemon=True)
        self._reader.start()  # an unread pipe stops the server when it is full
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5)
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"the server ended with code {self.process.returncode}") from None
                time.sleep(0.1)

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        return code

    def version(self) -> dict[str, object]:
        facts: dict[str, object] = json.loads(urllib.request.urlopen(f"{self.url}/version", timeout=10).read())
        return facts

    def leftovers(self) -> tuple[str, int]:
        """What is not given back within a second, and how many preemptions there were."""
        deadline = time.monotonic() + 1.0
        while True:
            now = metrics(self.url)
            blocks = int(now["headway_kv_blocks_total"] - now["headway_kv_blocks_free"])
            requests = int(now["headway_requests_running"] + now["headway_requests_waiting"])
            if (not blocks and not requests) or time.monotonic() > deadline:
                left = [f"{count} {name}" for count, name in ((blocks, "blocks"), (requests, "requests")) if count]
                return ", ".join(left), int(now.get("headway_preemptions_total", 0))
            time.sleep(0.02)


@contextmanager
def serving(options: Sequence[str], outcome: Outcome) -> Iterator[Served]:
    server = Served(options)
    try:
        yield server
    finally:
        outcome.code = server.end()
        print("".join(f"server: {line}" for line in server.log if " ERROR " in line), end="")


def run_once(reference: Reference, asks: list[Ask], outcome: Outcome, options: Sequence[str], debug_kv: bool) -> None:
    """Answer all asks here, then there, and note in `outcome` what differs."""
    expected = reference.answers(asks)
    outcome.num_asked = len(asks)
    with serving(options, outcome) as server:
        facts = server.version()
        facts.pop("version")
        facts.pop("speculation", None)  # it changes no token, which is what a run shows too
        if facts.pop("debug_kv", None) is not debug_kv:
            raise SystemExit(f"the server's KV store is not the one asked for (debug_kv should be {debug_kv})")
        if different := differences(reference.facts(), facts):
            raise SystemExit("the two sides do not compute alike:\n  " + "\n  ".join(different))
        began = time.monotonic()
        answers = asyncio.run(storm(server.url, asks, reference.temperature))
        outcome.seconds = time.monotonic() - began
        outcome.left, outcome.preemptions = server.leftovers()
    outcome.num_cut = sum(answer is None for answer in answers)
    outcome.wrong = [
        Wrong(ask, answer, want)
        for ask, answer, want in zip(asks, answers, expected, strict=True)
        if answer is not None and answer != want
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="clients of one run")
    parser.add_argument("--cut", type=float, default=0.3, help="share of the clients that leave early")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each later one has the next")
    parser.add_argument("--runs", type=int, default=1, help="each with a server of its own")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 instead of 1")
    parser.add_argument("--debug-kv", action="store_true", help="the server checks every read of the KV cache")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of the server: few of them make it preempt and evict")
    args = parser.parse_args()
    arm = " ".join(["greedy" if args.greedy else "sampled", *(["debug"] if args.debug_kv else [])])
    options = ["--debug-kv"] if args.debug_kv else []
    if args.num_blocks is not None:
        arm, options = f"{arm} {args.num_blocks} blocks", [*options, "--num-blocks", str(args.num_blocks)]
    outcomes = []
    with LLM() as llm:
        reference = Reference(llm, args.greedy)
        print(", ".join(f"{name} {value or 'none'}" for name, value in reference.facts().items()))
        print(HEADER)
        for seed in range(args.seed, args.seed + args.runs):
            asks = draw_asks(seed, args.requests, args.cut, read_prompts())
            outcome = Outcome(arm, seed)
            run_once(reference, asks, outcome, options, args.debug_kv)
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            if outcome.wrong:
                print("\n".join([*by_prompt(outcome.wrong, asks), *by_block(outcome.wrong, asks, reference.keys)]))
    num_good = sum(outcome.is_good for outcome in outcomes)
    print(f"{num_good} of {len(outcomes)} runs all right")
    return 0 if num_good == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
