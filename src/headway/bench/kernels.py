"""How near the kernels come to what the machine can do, for the shapes of one model.

For every matrix of a layer and the head, for one row to many, in every number format that is installed: operations
per second, bytes of weights read per second, and the share of the limit, which is the slower of compute at the
measured peak and one read of the weights. Weights come out of memory, as they do in a step: each call takes the next
of so many copies that no cache holds them all. Beside it torch's own `linear`, and attention per KV format.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from headway.backends.cpu import CpuDevice, open_device
from headway.bench import machine
from headway.bench.attention import AttentionRow, measure_attention
from headway.bench.console import print_json, print_table, progress
from headway.bench.limit import BYTES_PER_WEIGHT, Machine
from headway.bench.setup import ModelSetup
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.modelfile.source import open_model
from headway.models.registry import read_config
from headway.models.spec import ModelSpec

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
COPIES_BYTES = 128 * 2**20
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LinearRow:
    """One product: `rows` x `num_in` by a matrix of `num_in` x `num_out`."""

    dtype: str
    matrix: str
    num_in: int
    num_out: int
    rows: int
    us: float
    gflops: float
    gb_s: float  # weights alone
    of_limit: float
    torch_gflops: float | None  # torch has no equal for every format


@dataclass(frozen=True, slots=True)
class _Product:
    """What was timed, before it is held against the machine."""

    dtype: str
    matrix: str
    num_in: int
    num_out: int
    rows: int
    seconds: float
    torch_s: float | None

    def against(self, best: Machine) -> LinearRow:
        flops = 2.0 * self.rows * self.num_in * self.num_out
        num_bytes = self.num_in * self.num_out * BYTES_PER_WEIGHT[self.dtype]
        return LinearRow(
            dtype=self.dtype,
            matrix=self.matrix,
            num_in=self.num_in,
            num_out=self.num_out,
            rows=self.rows,
            us=round(self.seconds * 1e6, 1),
            gflops=round(flops / self.seconds / 1e9, 2),
            gb_s=round(num_bytes / self.seconds / 1e9, 2),
            of_limit=round(max(flops / best.flops, num_bytes / best.read_bytes) / self.seconds, 3),
            torch_gflops=None if self.torch_s is None else round(flops / self.torch_s / 1e9, 2),
        )


def run(setup: ModelSetup, *, rows: Sequence[int] = ROWS, as_json: bool = False) -> int:
    """Print a table per number format; with `as_json` the last line is one object with every table cell."""
    config = setup.config(dtype="float32") if setup.dtype is None else setup.config()
    spec = read_config(open_model(config.model).config, config.model.model_family)
    wanted = [setup.dtype] if setup.dtype else list(BYTES_PER_WEIGHT)
    devices = [device for device in (_open(config, dtype) for dtype in wanted) if device is not None]
    if not devices:
        raise ConfigError(f"these kernels multiply none of {', '.join(wanted)}; choose another dtype or kernels")
    products, attention, best = _measure(spec, devices, rows)
    linear = [product.against(best[product.dtype]) for product in products]
    read = max(one.read_bytes for one in best.values())
    print(f"read {read / 1e9:.1f} GB/s; threads {devices[0].threads}; kernels {devices[0].kernels.name}")
    for dtype, one in best.items():
        _show([row for row in linear if row.dtype == dtype], f"{dtype}: peak {one.flops / 1e9:.0f} GFLOP/s", rows)
    names = ("kv", "rows", "new", "context", "us", "GFLOP/s", "GB/s")
    print_table(names, [[getattr(row, field.name) for field in fields(row)] for row in attention], "attention, a layer")
    if as_json:
        facts = {"model": config.model.model, "threads": devices[0].threads, "kernels": devices[0].kernels.name}
        peaks = {dtype: round(one.flops / 1e9, 1) for dtype, one in best.items()}
        cells = {"linear": [asdict(row) for row in linear], "attention": [asdict(row) for row in attention]}
        print_json(facts | {"read_gb_s": round(read / 1e9, 2), "peak_gflops": peaks} | cells)
    return 0


def shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(in, out) of every matrix a step multiplies with."""
    return {
        "qkv": (spec.hidden, spec.q_size + 2 * spec.kv_size),
        "o": (spec.q_size, spec.hidden),
        "gate_up": (spec.hidden, 2 * spec.intermediate),
        "down": (spec.intermediate, spec.hidden),
        "head": (spec.hidden, spec.vocab_size),
    }


def _open(config: EngineConfig, dtype: str) -> CpuDevice | None:
    try:
        return open_device(config.model.kernels, config.model.threads, dtype)
    except ConfigError:
        return None  # this build of the kernels lacks the format; the others are still worth measuring


def _measure(
    spec: ModelSpec, devices: Sequence[CpuDevice], rows: Sequence[int]
) -> tuple[list[_Product], list[AttentionRow], dict[str, Machine]]:
    """What was timed, and the machine's best from before and after, since others may use it meanwhile."""
    products: list[_Product] = []
    torch.set_num_threads(devices[0].threads)
    with torch.inference_mode(), progress("kernels", len(devices) * len(shapes(spec)) * len(rows)) as update:
        before = [machine.measure(device.kernels, device.threads) for device in devices]
        for device in devices:
            for product in _products(spec, device, rows):
                products.append(product)
                update(len(products))
        attention = list(measure_attention(spec, devices[0].kernels))
        after = [machine.measure(device.kernels, device.threads) for device in devices]
    read = max(one.read_bytes for one in (*before, *after))
    pairs = zip(devices, before, after, strict=True)
    return products, attention, {one.dtype: Machine(max(a.flops, b.flops), read) for one, a, b in pairs}


def _products(spec: ModelSpec, device: CpuDevice, rows: Sequence[int]) -> Iterator[_Product]:
    kernels, dtype = device.kernels, device.dtype
    for matrix, (num_in, num_out) in shapes(spec).items():
        plain = torch.randn(num_out, num_in)
        packed = [one.numpy() for one in _copies(torch.from_numpy(kernels.pack(plain.numpy())))]
        theirs = _copies(plain.to(_TORCH_DTYPES[dtype])) if dtype in _TORCH_DTYPES else []
        for count in rows:
            x = torch.randn(count, num_in)
            ours_s = _seconds(functools.partial(kernels.linear, x.numpy()), packed, None, num_out)
            torch_s = None
            if theirs:
                torch_s = _seconds(functools.partial(functional.linear, x.to(theirs[0].dtype)), theirs)
            yield _Product(dtype, matrix, num_in, num_out, count, ours_s, torch_s)


def _copies(w: Tensor) -> list[Tensor]:
    return [w] + [w.clone() for _ in range(min(63, COPIES_BYTES // w.nbytes))]


def _seconds(work: Callable[..., object], weights: Sequence[object], *rest: object) -> float:
    """Of one call, over as many calls as there are copies or as take a twentieth of a second."""
    turn = itertools.cycle(weights)
    once = machine.best_seconds(lambda: work(next(turn), *rest), budget_s=0.0, least=1)
    count = max(1, min(len(weights), int(0.05 / once)))

    def many() -> None:
        for _ in range(count):
            work(next(turn), *rest)

    return machine.best_seconds(many, budget_s=0.1, least=2) / count


def _show(cells: Sequence[LinearRow], title: str, rows: Sequence[int]) -> None:
    lines: list[list[str]] = []
    for matrix, group in itertools.groupby(cells, key=lambda cell: cell.matrix):
        found = list(group)
        lines.append([f"{matrix} {found[0].num_in}x{found[0].num_out}", *(_ours(cell) for cell in found)])
        if found[0].torch_gflops is not None:
            lines.append(["  torch", *(f"{cell.torch_gflops:.0f}     " for cell in found)])
    print_table(("GFLOP/s, of limit", *map(str, rows)), lines, f"{title}; columns are rows of the product")


def _ours(cell: LinearRow) -> str:
    return f"{cell.gflops:.0f} {cell.of_limit:4.0%}"
