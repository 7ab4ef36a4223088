"""What a decode step on a CUDA device is made of: each kernel's time, its share, and how near it is to its limit.

Every figure is of a real step of the executor, replayed under torch's profiler, over KV cells that no cache holds. A
kernel's limit is the longer of two times: moving the bytes that it must at the measured read bandwidth, and its
products at the measured peak. Kernels whose operands lie in the cache may be faster than that; kernels that move next
to nothing have no limit. With dependent launch kernels overlap, waiting included: their times add up to more than the
step. Run it by `headway bench kernels --device cuda`, or without its packages by `python -m
headway.bench.device_kernels`.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headway.backends.cuda import DTYPES, KV_DTYPES, open_device
from headway.bench.console import end
from headway.bench.device import read_bandwidth, time_graph
from headway.bench.limit import Machine
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order, product
from headway.kernels.cuda.sampling import CHUNK
from headway.models.params import ModelWeights
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams
from headway.values.plan import Join, StepPlan

OTHER = "products"  # of a library, and ours that nothing is fused into
_FUSED = ("_gate_up", "_qkv")
_NAMES = (
    *("fetch", "prepare_decode", "embed_norm", "add_norm", "gather_norm", "rope_write", "silu_mul"),
    *("silu_mul_scaled", "quantize"),
    *_FUSED,
    *("decode", "prefill", "parts", "draw", "special", "publish"),
)
_WARM_STEPS = 8
_PEAK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of a step, all its launches together."""

    kernel: str
    us: float
    share: float  # of all kernels' times
    limit_us: float | None

    @property
    def of_limit(self) -> float | None:
        return None if self.limit_us is None else self.limit_us / self.us


class Decoding:
    """Decode rows of given lengths; their KV is random numbers, their blocks are scattered over the pool."""

    def __init__(self, executor: CudaExecutor, lengths: Sequence[int], seed: int = 0) -> None:
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
        name = next((name for name in _NAMES if event.key == name), OTHER)
        if seconds and not event.key.startswith(("Memcpy", "Memset")):
            times[name] = times.get(name, 0.0) + seconds / steps
    return times


def needs(spec: ModelSpec, weights: ModelWeights[Tensor], rows: int, kv_bytes: int) -> dict[str, tuple[float, float]]:
    """Bytes that a step of so many rows must move and operations it must do, by kernel; "head" is one of the products.

    What fusing spares, a kernel that is not fused must move: activations are counted in their own format.
    """
    size = weights["embed"].itemsize
    hidden, inner, width = spec.hidden * size, spec.intermediate * size, (spec.q_size + 2 * spec.kv_size) * size
    found: dict[str, tuple[float, float]] = {
        "decode": (kv_bytes, 0.0),
        "add_norm": (rows * 4 * hidden * (2 * spec.layers - 1), 0.0),
        "embed_norm": (rows * 3 * hidden, 0.0),
        "gather_norm": (rows * 3 * hidden, 0.0),
        "rope_write": (rows * 2 * width * spec.layers, 0.0),
        "silu_mul": (rows * 3 * inner * spec.layers, 0.0),
        "silu_mul_scaled": (rows * 3 * inner * spec.layers, 0.0),
        "quantize": (rows * spec.q_size * (size + 1) * spec.layers, 0.0),
        "parts": (rows * spec.vocab_size * size, 0.0),
        "draw": (rows * CHUNK * size, 0.0),
    }
    for name in ("qkv", "o", "gate_up", "down"):
        tensors = [t for key, t in weights.tensors.items() if key.split(".")[2:3] == [name]]
        matrix = spec.layers * _elements(spec)[name]
        found[name] = (sum(t.nbytes for t in tensors), 2.0 * rows * matrix)
    head = weights["embed" if spec.tie_embeddings else "head"]
    found["head"] = (head.nbytes, 2.0 * rows * spec.hidden * spec.vocab_size)
    return found


def _elements(spec: ModelSpec) -> dict[str, int]:
    return {
        "qkv": spec.hidden * (spec.q_size + 2 * spec.kv_size),
        "o": spec.q_size * spec.hidden,
        "gate_up": 2 * spec.hidden * spec.intermediate,
        "down": spec.intermediate * spec.hidden,
    }


def folded(times: Mapping[str, float]) -> dict[str, float]:
    """All products as one: where layers differ in format, a fused kernel has the matrices of only some layers."""
    others = {name: seconds for name, seconds in times.items() if name not in _FUSED}
    return others | {OTHER: others.get(OTHER, 0.0) + sum(times.get(name, 0.0) for name in _FUSED)}


def against(times: Mapping[str, float], wanted: Mapping[str, tuple[float, float]], machine: Machine) -> list[KernelRow]:
    """Kernels by time, each with its limit: a fused product has its own matrix, `products` the others."""
    mine = {"_gate_up": ["gate_up"], "_qkv": ["qkv"]}
    fused = {name for kernel, names in mine.items() if kernel in times for name in names}
    mine[OTHER] = [name for name in ("qkv", "o", "gate_up", "down", "head") if name not in fused]
    busy = sum(times.values())
    rows = []
    for kernel, seconds in sorted(times.items(), key=lambda item: -item[1]):
        parts = [wanted[name] for name in mine.get(kernel, [kernel]) if name in wanted]
        limit = sum(max(num_bytes / machine.read_bytes, flops / machine.flops) for num_bytes, flops in parts)
        rows.append(KernelRow(kernel, seconds * 1e6, seconds / busy, limit * 1e6 if parts else None))
    return rows


def peak(weights: ModelWeights[Tensor], spec: ModelSpec) -> float:
    """Operations per second of the library's products of many rows, in the format that layers compute in."""
    like, kind = weights["embed"], weights[f"layers.{spec.layers // 2}.gate_up"].dtype
    w = torch.randn(2 * spec.intermediate, spec.hidden, device=like.device).to(kind)
    x = torch.randn(_PEAK_ROWS, spec.hidden, device=like.device).to(kind)
    out = torch.empty(_PEAK_ROWS, 2 * spec.intermediate, dtype=like.dtype, device=like.device)
    return 2.0 * _PEAK_ROWS * w.numel() / time_graph(lambda: product(x, w, out), 0.25)


def report(
    decoding: Decoding, wanted: Mapping[str, tuple[float, float]], name: str, machine: Machine, *, is_mixed: bool
) -> dict[str, object]:
    """Print a table of the kernels in one step; the same as a record."""
    for _ in range(_WARM_STEPS):
        decoding.step()
    elapsed = sorted(decoding.step() for _ in range(9))[4]
    times = kernel_times(decoding)
    rows = against(folded(times) if is_mixed else times, wanted, machine)
    must = ("qkv", "o", "gate_up", "down", "head", "decode")
    read = sum(wanted[part][0] for part in must) / elapsed / machine.read_bytes
    limit = sum(max(wanted[p][0] / machine.read_bytes, wanted[p][1] / machine.flops) for p in must)
    print(f"{name}: step {elapsed * 1e3:.3f} ms, {read:.1%} of the read bandwidth, {limit / elapsed:.1%} of its limit")
    for row in rows:
        of = "" if row.of_limit is None else f"{row.of_limit:7.1%} of {row.limit_us:9.1f} us"
        print(f"  {row.kernel:16s} {row.us:9.1f} us {row.share:6.1%}  {of}", flush=True)
    kernels = [asdict(row) | {"of_limit": row.of_limit} for row in rows]
    return {
        "case": name,
        "step_us": elapsed * 1e6,
        "of_bandwidth": read,
        "of_limit": limit / elapsed,
        "kernels": kernels,
    }


def run(
    shape: str, *, dtype: str = "bfloat16", kv_dtype: str | None = None, blocks: int = 45_000, as_json: bool = False
) -> int:
    """Measure decode steps of one to 1,000 rows; with `as_json` the last line is one object with every table cell."""
    device, spec = open_device(), shape_of(shape)
    fix_order()
    weights = dummy_weights(spec, dtype=DTYPES[dtype], device=device.device)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    sizes = Sizes(1000, blocks, 4096, 1024, kv_dtype=KV_DTYPES[kv_dtype] if kv_dtype else None)
    machine = Machine(flops=peak(weights, spec), read_bytes=read_bandwidth(device.device))
    facts = {"device": device.name, "shape": shape, "dtype": dtype, "kv_dtype": kv_dtype or "the activations'"}
    print(f"{facts}; read {machine.read_bytes / 1e12:.2f} TB/s, products {machine.flops / 1e12:.0f} TFLOP/s")
    rng = random.Random(0)
    uneven = [min(2000, max(16, int(rng.lognormvariate(6.0, 0.8)))) for _ in range(392)]
    cases = {"1 x 600": [600], "8 x 600": [600] * 8, "32 x 600": [600] * 32, "64 x 600": [600] * 64}
    cases |= {"256 x 1024": [1004] * 256, "1000 x 600": [600] * 1000, "392 uneven": uneven}
    records = []
    with torch.inference_mode():
        executor = make_executor(spec, weights, sizes, launch)
        executor.fill_kv()
        for name, lengths in cases.items():
            kv_bytes = executor.kv_bytes_per_token * sum(length + 20 for length in lengths)
            wanted = needs(spec, weights, len(lengths), kv_bytes)
            records.append(
                report(Decoding(executor, lengths), wanted, f"{shape} {name}", machine, is_mixed=dtype == "fp8")
            )
    if as_json:
        print(json.dumps(facts | asdict(machine) | {"cases": records}))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--kv-dtype", choices=sorted(KV_DTYPES), help="the activations' if not given")
    parser.add_argument("--blocks", type=int, default=45_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    run(args.shape, dtype=args.dtype, kv_dtype=args.kv_dtype, blocks=args.blocks, as_json=args.json)


if __name__ == "__main__":
    end(main)
