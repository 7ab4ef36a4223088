"""Whether a tenant can learn what another one asked: `tools/isolation.py [--probes 1000] [--shared-cache]`.

The victim sends a secret prompt. The attacker, another tenant, times two prompts: the victim's, and one that was never
sent. From the two sets of times it tries to say which is which; AUC is how often it is right about a pair: 0.5 is
guessing, 1.0 is knowing. `cached_tokens` is asked too. The victim's own second request must still find its prefix.
A tiny model that computes, so that time differs where work does. Exits 1 if anything leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from loadkit import Reply, Server, ask, serving

VICTIM, ATTACKER = "sk-victim", "sk-attacker"
KEYS = f'[tenants.victim]\nkeys = ["{VICTIM}"]\n[tenants.attacker]\nkeys = ["{ATTACKER}"]\n'
MOST_AUC, LEAST_OWN = 0.55, 0.95


@dataclass(slots=True)
class Findings:
    """Seconds by kind of probe, and cached tokens."""

    foreign: list[float] = field(default_factory=list)  # the victim's prompt, asked by the attacker
    unseen: list[float] = field(default_factory=list)  # a prompt that was never sent
    own: list[float] = field(default_factory=list)  # the victim's prompt, asked again by the victim
    fresh: list[float] = field(default_factory=list)  # the victim's first time
    foreign_cached: int = 0
    own_cached: int = 0

    @property
    def leak(self) -> float:
        """How well times tell a foreign prompt from an unseen one."""
        return max(auc(self.foreign, self.unseen), 1 - auc(self.foreign, self.unseen))

    @property
    def own_hit(self) -> float:
        """How well they tell the victim's second time from its first: the cache must still work."""
        return auc(self.own, self.fresh)


def auc(fast: list[float], slow: list[float]) -> float:
    """How often one of `fast` is below one of `slow`, ties half."""
    order = sorted([(value, 0) for value in fast] + [(value, 1) for value in slow])
    rank_sum, at = 0.0, 0
    while at < len(order):
        end = at
        while end < len(order) and order[end][0] == order[at][0]:
            end += 1
        rank_sum += sum((at + 1 + end) / 2 for _, kind in order[at:end] if kind == 1)
        at = end
    count = len(fast) * len(slow)
    return (rank_sum - len(slow) * (len(slow) + 1) / 2) / count


async def one(server: Server, prompt: list[int], key: str) -> tuple[float, int]:
    """Seconds and cached tokens."""
    reply: Reply = await ask(server, {"prompt": prompt, "max_tokens": 1, "temperature": 0}, key=key)
    if reply.status != 200:
        raise SystemExit(f"status {reply.status}: {reply.body[:300]!r}")
    return reply.total, int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def probe(server: Server, count: int, num_tokens: int, seed: int = 0) -> Findings:
    """Each secret is new, and so is each decoy; which of the two is asked first is drawn."""
    rng, found = random.Random(seed), Findings()
    for _ in range(count):
        secret, decoy = ([rng.randrange(1, 200) for _ in range(num_tokens)] for _ in range(2))
        found.fresh.append((await one(server, secret, VICTIM))[0])
        pair = [(secret, found.foreign), (decoy, found.unseen)]
        for prompt, times in rng.sample(pair, 2):
            seconds, cached = await one(server, prompt, ATTACKER)
            times.append(seconds)
            found.foreign_cached += cached
        seconds, cached = await one(server, secret, VICTIM)
        found.own.append(seconds)
        found.own_cached += cached
    return found


def measure(count: int, num_tokens: int, *options: str) -> Findings:
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.toml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        with serving("tiny", "--keys", str(keys), "--num-blocks", "8000", *options) as server:
            asyncio.run(probe(server, 20, num_tokens, seed=1))  # while caches are cold
            return asyncio.run(probe(server, count, num_tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=1000, help="of each kind")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--shared-cache", action="store_true", help="what it looks like where tenants share")
    args = parser.parse_args()
    found = measure(args.probes, args.tokens, *(["--shared-cache"] if args.shared_cache else []))
    print(f"probes                     {args.probes} + {args.probes}, prompts of {args.tokens} tokens")
    print(f"AUC foreign against unseen {found.leak:.3f}   (at most {MOST_AUC})")
    print(f"cached_tokens, attacker    {found.foreign_cached}   (0)")
    print(f"AUC own second time        {found.own_hit:.3f}   (at least {LEAST_OWN})")
    print(f"cached_tokens, own         {found.own_cached / args.probes:.0f} of {args.tokens} each")
    is_good = found.leak <= MOST_AUC and not found.foreign_cached and found.own_hit >= LEAST_OWN
    print("isolated" if is_good else "NOT ISOLATED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
