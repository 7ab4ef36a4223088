"""What this machine can do at most, measured: multiplications per second, and bytes per second out of memory.

The peak is the best of numpy's product of two 1,024-cubes and of our own kernels on shapes that suit them, so that
neither library's weakness lowers the bar; numpy takes every core, so it counts only where the kernels do too. Reading
is timed on a gigabyte, which no cache holds, on all threads. Also here: how much memory this process had at its worst.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headway.backends._host import usable_cores
from headway.bench.limit import Machine
from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet

CUBE = 1024
READ_BYTES = 2**30
# rows, in, out: from a tile that stays in the first caches to the cube numpy gets.
_TILES = ((32, 512, 960), (256, 512, 512), (256, 576, 3072), (CUBE, CUBE, CUBE))


def measure(kernels: KernelSet, threads: int) -> Machine:
    """The peak of this kernel set, which runs on so many threads, and of this moment."""
    others = numpy_flops(CUBE) if threads >= usable_cores() else 0.0
    return Machine(flops=max(others, own_flops(kernels)), read_bytes=read_speed(READ_BYTES, threads))


def numpy_flops(size: int) -> float:
    """Multiplications and additions per second of numpy's float32 product of two cubes."""
    a, b, c = _normal(size, size), _normal(size, size), np.empty((size, size), np.float32)
    return 2.0 * size**3 / best_seconds(lambda: np.matmul(a, b, out=c))


def own_flops(kernels: KernelSet) -> float:
    """The same for our kernels' best shape, in their own number format."""
    return max(linear_flops(kernels, rows, num_in, num_out) for rows, num_in, num_out in _TILES)


def linear_flops(kernels: KernelSet, rows: int, num_in: int, num_out: int) -> float:
    x, w = _normal(rows, num_in), kernels.pack(_normal(num_out, num_in))
    return 2.0 * rows * num_in * num_out / best_seconds(lambda: kernels.linear(x, w, None, num_out))


def read_speed(num_bytes: int, threads: int) -> float:
    """Bytes per second that come out of memory."""
    data = np.ones(num_bytes // 4, np.float32)  # written first: untouched pages all lead to one page of zeros
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        sum_s = best_seconds(lambda: list(pool.map(np.sum, parts)), budget_s=0.5)
        max_s = best_seconds(lambda: list(pool.map(np.max, parts)), budget_s=0.5)
    return data.nbytes / min(sum_s, max_s)


def _normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def best_seconds(work: Callable[[], object], budget_s: float = 0.25, least: int = 3) -> float:
    """Seconds of one call: the shortest of those that fit into the budget, after one that does not count."""
    work()
    shortest, begun, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - begun < budget_s:
        start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - start)
        count += 1
    return shortest


def forget_peak_memory() -> bool:
    """Start the peak anew; False where the system does not let a process do that and the peak is since the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """The most bytes this process had resident since `forget_peak_memory`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
