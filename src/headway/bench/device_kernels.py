"""What a decode step on a CUDA device is made of: each kernel's time, its share, attention's part of the bandwidth.

Every figure is of a real step of the executor, replayed under torch's profiler, over KV cells that no cache holds. Run
it by `python -m headway.bench.device_kernels`.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from headway.backends.cuda import DTYPES, open_device
from headway.bench.device import read_bandwidth
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams
from headway.values.plan import Join, StepPlan

_NAMES = (
    *("fetch", "prepare_decode", "embed_norm", "add_norm", "gather_norm", "rope_write", "silu_mul"),
    *("silu_mul_scaled", "quantize"),
    *("_product", "_gate_up", "_qkv"),
    *("decode", "prefill", "parts", "draw", "special", "publish", "raise_flag"),
)
_WARM_STEPS = 8


class Decoding:
    """Decode rows of given lengths; their KV is random numbers, their blocks are scattered over the pool."""

    def __init__(self, executor: CudaExecutor, spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> None:
        self._executor = executor
        self._rows = array("i", range(len(lengths)))
        capacity = executor.capacity()
        free = list(range(capacity.num_blocks))
        random.Random(seed).shuffle(free)
        params = SamplingParams(temperature=1.0, max_tokens=1)
        joins = []
        for row, length in enumerate(lengths):
            table = [free.pop() for _ in range(-(-(length + 64) // capacity.block_size))]
            joins.append(Join(row, row, 0, [17] * (length + 1), 1, table, length, params, row, frozenset()))
        self._id = 0
        self._submit(StepPlan(0, array("i"), joins=joins, leaves=[*range(capacity.num_rows)]))

    def step(self) -> float:
        """Seconds that the device took."""
        self._id += 1
        return self._submit(StepPlan(self._id, self._rows))

    def _submit(self, plan: StepPlan) -> float:
        self._executor.submit(plan)
        result = self._executor.collect()
        assert not result.failed, result.failed
        return result.elapsed


def kernel_times(decoding: Decoding, steps: int = 4) -> dict[str, float]:
    """Seconds per step by kernel; what has no name of ours is a product of a library."""
    for _ in range(_WARM_STEPS):
        decoding.step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            decoding.step()
    times: dict[str, float] = {}
    for event in found.key_averages():
        seconds = event.self_device_time_total / 1e6
        name = next((name for name in _NAMES if event.key == name), "products")
        if seconds and not event.key.startswith(("Memcpy", "Memset")):
            times[name] = times.get(name, 0.0) + seconds / steps
    return times


def report(
    executor: CudaExecutor, spec: ModelSpec, weight_bytes: int, lengths: Sequence[int], name: str, bandwidth: float
) -> None:
    decoding = Decoding(executor, spec, lengths)
    for _ in range(_WARM_STEPS):
        decoding.step()
    elapsed = sorted(decoding.step() for _ in range(9))[4]
    times = kernel_times(decoding)
    kv_bytes = executor.kv_bytes_per_token * sum(length + 20 for length in lengths)
    attention = kv_bytes / times["decode"]
    busy = sum(times.values())
    shares = {name: f"{seconds / busy:.1%}" for name, seconds in sorted(times.items(), key=lambda item: -item[1])}
    products = sum(times.get(name, 0.0) for name in ("products", "_product", "_gate_up", "_qkv"))
    print(
        f"{name}: step {elapsed * 1e3:.3f} ms, {(weight_bytes + kv_bytes) / elapsed / bandwidth:.1%} of the read "
        f"bandwidth, kernels {busy * 1e3:.3f} ms; attention {times['decode'] * 1e3:.3f} ms, "
        f"{attention / 1e12:.2f} TB/s = {attention / bandwidth:.1%} of {bandwidth / 1e12:.2f}; products "
        f"{products * 1e3:.3f} ms; {shares}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--kv-dtype", choices=sorted(DTYPES), help="the activations' if not given")
    parser.add_argument("--blocks", type=int, default=45_000)
    args = parser.parse_args()
    device, spec = open_device(), shape_of(args.shape)
    fix_order()
    weights = dummy_weights(spec, dtype=DTYPES[args.dtype], device=device.device)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    kv_dtype = DTYPES[args.kv_dtype] if args.kv_dtype else None
    sizes = Sizes(1000, args.blocks, 4096, 1024, kv_dtype=kv_dtype)
    bandwidth = read_bandwidth(device.device)
    # Of a table that is not the head too, a step reads a few rows.
    weight_bytes = weights.num_bytes - (0 if spec.tie_embeddings else weights["embed"].nbytes)
    rng = random.Random(0)
    uneven = [min(2000, max(16, int(rng.lognormvariate(6.0, 0.8)))) for _ in range(392)]
    with torch.inference_mode():
        executor = make_executor(spec, weights, sizes, launch)
        executor.fill_kv()
        cases = {"1 x 600": [600], "8 x 600": [600] * 8, "32 x 600": [600] * 32, "64 x 600": [600] * 64}
        cases |= {"256 x 1024": [1004] * 256, "1000 x 600": [600] * 1000, "392 uneven": uneven}
        for name, lengths in cases.items():
            report(executor, spec, weight_bytes, lengths, f"{args.shape} {name}", bandwidth)


if __name__ == "__main__":
    main()
