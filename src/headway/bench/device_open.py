"""Open loop on a CUDA device, requests arriving by the clock: ITL and TTFT.

    1. closed loop: all requests at once, without and with the target; tokens and requests per second
    2. open loop: Poisson arrivals at a share of the first of these rates, with the target

One prompt in ten is replaced by one of 4,000 tokens. Run it by `python -m headway.bench.device_open`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headway.backends.cuda import DTYPES, KV_DTYPES, default_slots, open_device
from headway.bench.console import end
from headway.bench.device import StepTimes, add_model_flags, answer, make_engine, make_works
from headway.bench.workload import WorkItem
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.garbage import settle_garbage
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order
from headway.models.shapes import shape_of
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams

LONG_PROMPT = 4000
_EVERY = 10  # one prompt in so many is long
_SETTLING = 0.2  # share of the arrivals that are served and not counted


@dataclass(slots=True)
class Arrivals:
    """What was seen of requests that come by the clock, in seconds."""

    due: list[float]
    first: dict[int, float] = field(default_factory=dict)  # request -> from its arrival to its first token
    itls: list[float] = field(default_factory=list)
    done_s: float = 0.0

    def run(self, engine: Engine, works: Sequence[WorkItem], counted_from: int) -> None:
        """Serve until the last one has ended; ITLs and first tokens of requests from `counted_from` on are kept."""
        last: dict[int, float] = {}
        began, following = time.perf_counter(), 0
        while following < len(works) or engine.has_work:
            now = time.perf_counter() - began
            while following < len(works) and self.due[following] <= now:
                work = works[following]
                params = SamplingParams(max_tokens=work.max_tokens, temperature=1.0, ignore_eos=True)
                engine.add(Submit(following, work.tokens, params, seed=following))
                following += 1
            if not engine.has_work:
                continue
            emission = engine.step()
            now = time.perf_counter() - began
            for id in emission.ids:
                if id >= counted_from:
                    if id in last:
                        self.itls.append(now - last[id])
                    else:
                        self.first[id] = now - self.due[id]
                    last[id] = now
        self.done_s = time.perf_counter() - began


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share lies below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def lengthen(works: Sequence[WorkItem], seed: int = 0) -> list[WorkItem]:
    """Every tenth prompt becomes a long one."""
    rng = random.Random(seed)
    prompts = {i: [rng.randrange(20, 40_000) for _ in range(LONG_PROMPT)] for i in range(0, len(works), _EVERY)}
    return [WorkItem(prompts.get(i, work.tokens), work.max_tokens) for i, work in enumerate(works)]


def run(args: argparse.Namespace) -> None:
    device, spec = open_device(), shape_of(args.shape)
    fix_order()
    weights = dummy_weights(spec, dtype=DTYPES[args.dtype], device=device.device)
    kv_dtype = KV_DTYPES[args.kv_dtype] if args.kv_dtype else None
    slots = args.rows or default_slots(args.target_itl_ms, weights.num_bytes / device.bytes_per_s)
    print(f"{slots} slots", flush=True)
    sizes = Sizes(slots, args.blocks, args.max_len, args.tokens, depth=args.depth, kv_dtype=kv_dtype)
    works = lengthen(make_works(args))
    target = args.target_itl_ms
    with torch.inference_mode():
        executor = make_executor(spec, weights, sizes, Launch(device.num_sms, device.has_dependent_launch))
        for bucket in (bucket for bucket in executor.graphs.buckets() if not bucket.is_special):
            executor.graphs.record(bucket)

        def engine(itl: float | None) -> Engine:
            settle_garbage()
            return make_engine(StepTimes(executor), spec, sizes, caching=False, target_itl_ms=itl)

        rates = {}
        num = sum(work.max_tokens for work in works)
        for itl in (None, target):
            answer(engine(itl), works[:64], 1.0)
            wall, _ = answer(engine(itl), works, 1.0)
            rates[itl] = len(works) / wall
            print(f"closed loop, target {itl}: {num / wall:,.0f} output tok/s, {rates[itl]:.2f} requests/s", flush=True)
        print(f"the target costs {1 - rates[target] / rates[None]:.1%} of the closed loop's capacity")
        _open_loop(args, engine(target), works, args.load * rates[None])


def _open_loop(args: argparse.Namespace, engine: Engine, works: Sequence[WorkItem], rate: float) -> None:
    rng, due, at = random.Random(1), [], 0.0
    count = min(len(works), int(rate * args.seconds))
    for _ in range(count):
        at += rng.expovariate(rate)
        due.append(at)
    seen = Arrivals(due)
    settled = int(_SETTLING * count)
    seen.run(engine, works[:count], settled)
    short = [value for id, value in seen.first.items() if id % _EVERY]
    long = [value for id, value in seen.first.items() if not id % _EVERY]
    p50, p99 = quantile(seen.itls, 0.5), quantile(seen.itls, 0.99)
    print(
        f"open loop, {rate:.2f} requests/s = {args.load:.0%}, {count} requests in {seen.done_s:.0f} s, the first "
        f"{settled} not counted: ITL P50 {p50 * 1e3:.1f} ms, P99 {p99 * 1e3:.1f} ms, ratio {p99 / p50:.2f}, largest "
        f"{max(seen.itls) * 1e3:.0f}; first token of short ones P50 {quantile(short, 0.5) * 1e3:.1f} ms, P99 "
        f"{quantile(short, 0.99) * 1e3:.0f}; of long ones P50 {quantile(long, 0.5) * 1e3:.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--target-itl-ms", type=float, default=24.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the closed loop's requests per second")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.set_defaults(rows=None)  # as many as the backend would have with the target
    run(parser.parse_args())


if __name__ == "__main__":
    end(main)
