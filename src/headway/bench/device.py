"""How fast a CUDA device answers a workload offline, beside what no engine on it could beat.

    limit = output tokens / (products of every step at their sustained speed + reads of KV at the copy-free bandwidth)

The steps are those of an ideal scheduler: every request runs from the start, prompts are computed once, a row that has
its last token leaves. Products are timed in this process, long enough for the device to reach the clock that it keeps.
Run it by `python -m headway.bench.device`: it needs torch, Triton and numpy, nothing else.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.backends.cuda import DTYPES, KV_DTYPES, CudaDevice, open_device
from headway.bench.console import end
from headway.bench.workload import WorkItem, chat_mix, read_workload
from headway.build import build_scheduler
from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Submit
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity, Executor, Late
from headway.engine.garbage import settle_garbage
from headway.engine.metrics import EngineMetrics
from headway.kernels.cuda.kernels import TritonKernels
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.ops import Scaled
from headway.kernels.cuda.probe import read_all
from headway.kernels.cuda.products import fix_order
from headway.models.params import ModelWeights
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan, StepResult

_ROWS = (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
_SUSTAINED_S = 0.25
_WAITING = 256


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of all products of a step by its number of rows; linear between measured points and beyond the last."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        at = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        x0, x1, y0, y1 = self.rows[at - 1], self.rows[at], self.seconds[at - 1], self.seconds[at]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class StepTimes:
    """An executor that forwards every call, adds up the time of the steps and keeps what lies between them."""

    def __init__(self, inner: CudaExecutor) -> None:
        self.inner = inner
        self.submit_s = self.device_s = 0.0
        self.steps = self.mixed = 0
        self.idle_ns: list[int] = []  # from the end of a step to the begin of the next, by the device's clock
        self._ended: int | None = None
        self.first_s = self.last_s = 0.0  # when the first plan was submitted and the last one collected

    def capacity(self) -> Capacity:
        return self.inner.capacity()

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self.inner.submit(plan)
        self.submit_s += time.perf_counter() - began
        self.first_s = self.first_s or time.perf_counter()
        self.steps += 1
        self.mixed += bool(plan.chunks)

    def supply(self, plan_id: int, late: Late) -> None:
        self.inner.supply(plan_id, late)

    def collect(self) -> StepResult:
        result = self.inner.collect()
        self.device_s += result.elapsed
        began, ended = self.inner.last_ns
        if self._ended is not None:
            self.idle_ns.append(began - self._ended)
        self._ended = ended
        self.last_s = time.perf_counter()
        return result

    def close(self) -> None:
        self.inner.close()


def make_engine(
    executor: Executor, spec: ModelSpec, sizes: Sizes, *, caching: bool, target_itl_ms: float | None
) -> Engine:
    """The production engine over an executor; the scheduler is the one that serves."""
    config = EngineConfig.of(
        num_blocks=sizes.num_blocks,
        prefix_caching=caching,
        max_num_seqs=sizes.num_rows,
        max_num_batched_tokens=sizes.max_tokens,
        max_waiting=1 << 20,
        depth=sizes.depth,
        target_itl_ms=target_itl_ms,
    )
    clock = MonotonicClock()
    metrics = EngineMetrics(clock, None)
    steps = executor.capacity().step_sizes
    scheduler = build_scheduler(config, sizes.num_blocks, metrics, sizes.host_blocks, step_sizes=steps)
    info = EngineInfo("dummy", sizes.max_len, spec.vocab_size, sizes.block_size, sizes.num_blocks, sizes.num_rows)
    return Engine(
        *(scheduler, executor, info, metrics, clock), depth=sizes.depth, max_waiting=1 << 20, keeps_tokens=True
    )


def answer(engine: Engine, works: Sequence[WorkItem], temperature: float) -> tuple[float, dict[int, Sequence[int]]]:
    """Seconds from the first submission to the last token, and the answers."""
    answers: dict[int, Sequence[int]] = {}
    began = time.perf_counter()
    waiting = iter(enumerate(works))
    while True:
        # As many as the next steps can take: the device begins with the first while the host adds the last.
        while engine.scheduler.num_waiting < _WAITING and (entry := next(waiting, None)) is not None:
            id, work = entry
            params = SamplingParams(max_tokens=work.max_tokens, temperature=temperature, ignore_eos=True)
            engine.add(Submit(id, work.tokens, params, seed=id))
        if not engine.has_work:
            break
        answers |= {output.id: output.tokens for output in engine.step().finished}
    return time.perf_counter() - began, answers


def product_curves(spec: ModelSpec, weights: ModelWeights[Tensor], launch: Launch) -> tuple[Curve, Curve]:
    """Of the layers' products and of the head's."""
    kernels = TritonKernels(launch)
    names = [f"layers.{index}.{name}" for index in range(spec.layers) for name in ("qkv", "o", "gate_up", "down")]
    layers = [weights[name] for name in names]
    head = [weights["embed" if spec.tie_embeddings else "head"]]
    curves = []
    for matrices in (layers, head):
        seconds = tuple(_sustained(kernels, matrices, rows) for rows in _ROWS)
        curves.append(Curve(_ROWS, seconds))
    return curves[0], curves[1]


def _sustained(kernels: TritonKernels, matrices: Sequence[Tensor], rows: int) -> float:
    device = matrices[0].device
    # Layers may differ in format; results of e4m3 are bfloat16.
    inputs = {(w.shape[1], w.dtype): torch.randn(rows, w.shape[1], device=device).to(w.dtype) for w in matrices}
    kinds = {w.dtype: torch.bfloat16 if w.dtype == DTYPES["fp8"] else w.dtype for w in matrices}
    outputs = {
        (w.shape[0], w.dtype): torch.empty(rows, w.shape[0], device=device, dtype=kinds[w.dtype]) for w in matrices
    }

    def once() -> None:
        for w in matrices:
            x, out = inputs[w.shape[1], w.dtype], outputs[w.shape[0], w.dtype]
            kernels.linear(Scaled(x), Scaled(w), out)

    return time_graph(once, _SUSTAINED_S)


def time_graph(once: Callable[[], object], seconds: float) -> float:
    """Seconds per replay of recorded work, repeated for about so long; the second half counts."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    count = max(2, round(seconds / 2 / (time.perf_counter() - began)))
    for _ in range(count):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(count):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / count


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that reading alone can reach."""
    data = torch.randn(1 << 30, device=device)
    out = torch.empty(1024, device=device)
    return data.nbytes / time_graph(lambda: read_all(data, out), 0.1)


def ideal_seconds(works: Sequence[WorkItem], layers: Curve, head: Curve, kv_bytes: int, bandwidth: float) -> float:
    """Seconds of the ideal steps: prompts once, then one step per output token of the longest answer."""
    total = layers(4096) / 4096 * sum(len(work.tokens) for work in works) + head(len(works))
    cells = sum((len(work.tokens) ** 2) / 2 for work in works) / 64  # a tile of queries shares one read
    for k in range(1, max(work.max_tokens for work in works)):
        live = [len(work.tokens) + k for work in works if work.max_tokens > k]
        total += layers(len(live)) + head(len(live))
        cells += sum(live)
    return total + cells * kv_bytes / bandwidth


def run(args: argparse.Namespace) -> dict[str, object]:
    """Answer the workload twice; print both and the limit."""
    device = open_device()
    spec, dtype = shape_of(args.shape), DTYPES[args.dtype]
    fix_order()
    began = time.perf_counter()
    weights = dummy_weights(spec, dtype=dtype, device=device.device)
    works = make_works(args)
    kv_dtype = KV_DTYPES[args.kv_dtype] if args.kv_dtype else None
    sizes = Sizes(args.rows, args.blocks, args.max_len, args.tokens, depth=args.depth, kv_dtype=kv_dtype)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    with torch.inference_mode():
        executor = make_executor(spec, weights, sizes, launch)
        kinds = f"{args.dtype}, KV {args.kv_dtype or 'in the activations format'}"
        print(f"{device.name}, {args.shape}, {kinds}, set up in {time.perf_counter() - began:.1f} s", flush=True)
        result = _rounds(args, executor, spec, sizes, works)
        result["limit"] = _print_limit(spec, weights, launch, works, device, executor.kv_bytes_per_token)
    best = result["tok_s"]
    assert isinstance(best, float)
    assert isinstance(result["limit"], float)
    print(f"output tok/s {best:,.0f} = {best / result['limit']:.1%} of the limit {result['limit']:,.0f}")
    return result


def _rounds(
    args: argparse.Namespace, executor: CudaExecutor, spec: ModelSpec, sizes: Sizes, works: Sequence[WorkItem]
) -> dict[str, object]:
    result: dict[str, object] = {}
    num = sum(work.max_tokens for work in works)
    for round_ in range(args.rounds):
        times = StepTimes(executor)
        executor.waited_s = 0.0
        engine = make_engine(times, spec, sizes, caching=args.caching, target_itl_ms=args.target_itl_ms)
        settle_garbage()
        graphs = executor.graphs.num_recorded
        began = time.perf_counter()
        wall, answers = answer(engine, works, args.temperature)
        lengths = all(len(answers[id]) == work.max_tokens for id, work in enumerate(works))
        host = wall - executor.waited_s
        result = {
            "tok_s": num / wall,
            "steps": times.steps,
            "mixed_steps": times.mixed,
            "device_idle": 1 - times.device_s / wall,
            **_idle(times),
            "before_ms": (times.first_s - began) * 1e3,
            "after_ms": (began + wall - times.last_s) * 1e3,
            "host_us_per_token": host / num * 1e6,
            "submit_us_per_step": times.submit_s / times.steps * 1e6,
            "other_host_us_per_step": (host - times.submit_s) / times.steps * 1e6,
            "new_graphs": executor.graphs.num_recorded - graphs,
            "lengths_right": lengths,
            "blocks_back": engine.stats().blocks_free == sizes.num_blocks,
        }
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        print(f"round {round_ + 1}: {shown}", flush=True)
    return result


def _idle(times: StepTimes) -> dict[str, object]:
    """What the device waited between steps: without the time before the first and after the last one."""
    idle = sorted(times.idle_ns)
    total = sum(idle) * 1e-9
    return {
        "idle_between": total / (total + times.device_s),
        "idle_us": idle[len(idle) // 2] / 1e3,
        "idle_p99_us": idle[len(idle) * 99 // 100] / 1e3,
        "idle_most_us": idle[-1] / 1e3,
    }


def _print_limit(
    spec: ModelSpec,
    weights: ModelWeights[Tensor],
    launch: Launch,
    works: Sequence[WorkItem],
    device: CudaDevice,
    kv_bytes: int,
) -> float:
    layers, head = product_curves(spec, weights, launch)
    bandwidth = read_bandwidth(device.device)
    seconds = ideal_seconds(works, layers, head, kv_bytes, 0.95 * bandwidth)
    rows = {n: round((a + b) * 1e3, 3) for n, a, b in zip(_ROWS, layers.seconds, head.seconds, strict=True)}
    print(f"read {bandwidth / 1e12:.2f} TB/s, of which 95 % count for KV; sustained products, ms by rows: {rows}")
    return sum(work.max_tokens for work in works) / seconds


def make_works(args: argparse.Namespace) -> list[WorkItem]:
    """The requests that the flags name."""
    if args.even is not None:
        num_prompt, num_answer = args.even
        return [WorkItem([17 + i % 1000] * num_prompt, num_answer) for i in range(args.requests)]
    if args.workload is None:
        return chat_mix(args.requests, 0)
    return read_workload(args.workload, args.requests)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What is computed, how much at a time, and for which requests."""
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--kv-dtype", choices=sorted(KV_DTYPES), help="the activations' if not given")
    parser.add_argument(
        "--workload", type=Path, help="a file of JSON lines with tokens and max_tokens; chat-mix if not given"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--even", type=int, nargs=2, metavar=("IN", "OUT"), help="equal lengths instead of a workload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--target-itl-ms", type=float)
    parser.add_argument("--caching", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    end(main)
