"""Which buckets steps have, and the recorded graph of each.

A graph is recorded once: its bucket is run first, over an empty packet that leaves nothing behind, so that kernels are
compiled and libraries have their workspaces; then it is captured. That is done for a bucket when the first step needs
it, or earlier, while nothing else is to do; once all are recorded, no step allocates, compiles or captures anything.
Where there is no CUDA device every replay launches.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from headway.kernels.cuda.compile import compile_all
from headway.runner.cuda.packet import Packed
from headway.runner.cuda.step import Bucket, DeviceStep
from headway.runner.cuda.wire import Wire

log = logging.getLogger(__name__)

_FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_DECODE_STEP = 32
_SLOW = 448  # rows of llama-3.1-8b take 4 ms more than 480 do: the library adds up so many in another order
# 32 rows more are 8 % of a step of 300: steps are to be padded by little.
_MIXED = (64, *range(96, _SLOW, 32), 480, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
_TOKEN_STEP = 1024
_SAMPLE_SIZES = (16, 128, 512)


class Graphs:
    """At most one graph per bucket; `num_recorded` grows only while buckets are new."""

    def __init__(self, step: DeviceStep, wire: Wire, idle: Wire, *, max_rows: int, max_tokens: int) -> None:
        self.step, self._wire, self._idle = step, wire, idle
        self._is_cuda = wire.counter.device.type == "cuda"
        sizes = (*_FEW, *range(96, max_rows, _DECODE_STEP))
        self._decode = [n for n in sizes if n < max_rows and n != _SLOW] + [max_rows]
        self._tokens = _sizes(_MIXED, _TOKEN_STEP, max_tokens)
        self._samples = [n for n in _SAMPLE_SIZES if n < max_rows] + [max_rows]
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._pool = None if not self._is_cuda else torch.cuda.graph_pool_handle()
        self._ahead = self.buckets()
        self.num_recorded = 0
        self.recording_s = 0.0

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of the buckets with chunks, ascending."""
        return tuple(self._tokens)

    def bucket(self, packed: Packed, *, is_special: bool) -> Bucket:
        """The smallest bucket that holds a packet."""
        if not packed.is_mixed:
            size = _least(self._decode, packed.num_decode)
            return Bucket(size, size, False, is_special)
        samples = _least(self._samples, packed.num_samples)
        tokens = max(packed.num_decode + packed.num_tokens, self._fewest_tokens(samples))
        return Bucket(_least(self._tokens, tokens), samples, True, is_special)

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket, those of few rows first and those that are rarely needed last."""
        for is_special in (False, True):
            for size in self._decode:
                yield Bucket(size, size, False, is_special)
            for tokens in self._tokens:
                for samples in self._samples:
                    if tokens >= self._fewest_tokens(samples):
                        yield Bucket(tokens, samples, True, is_special)

    def _fewest_tokens(self, samples: int) -> int:
        """Of a bucket with so many samples: steps that sample one position often are rare and are padded instead."""
        return max((size + 1 for size in self._samples if size < samples), default=0)

    def record_next(self) -> bool:
        """Record the next bucket that no step has needed yet; False if there is none. Waits for the device."""
        bucket = next((bucket for bucket in self._ahead if bucket not in self._graphs), None)
        if bucket is None or not self._is_cuda:
            return False
        self.record(bucket)
        return True

    def compile(self) -> None:
        """Compile what most buckets need, before the first step needs it."""
        if not self._is_cuda:
            return
        began = time.perf_counter()
        sizes = {n for n in (1, 32, 64) if n in self._decode} | {self._decode[-1]}
        wanted = [Bucket(n, n, is_mixed=False) for n in sorted(sizes)]
        wanted += [Bucket(n, self._samples[0], is_mixed=True) for n in (self._tokens[0], self._tokens[-1])]
        wanted.append(Bucket(self._decode[0], self._decode[0], is_mixed=False, is_special=True))
        num = compile_all(lambda: self._try(wanted))
        log.info("%d kernels compiled or found in %.1f s", num, time.perf_counter() - began)

    def replay(self, bucket: Bucket) -> None:
        """Queue a step; records it first if its bucket is new."""
        if not self._is_cuda:
            self.step.launch(bucket, self._wire)
            return
        if bucket not in self._graphs:
            self.record(bucket)
        self._graphs[bucket].replay()

    def rehearse(self, bucket: Bucket) -> None:
        """Launch the bucket over an empty packet: kernels are compiled, and nothing is left behind."""
        self.step.launch(bucket, self._idle)

    def _try(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.step.launch(bucket, self._idle, is_trial=True)

    def record(self, bucket: Bucket) -> None:
        """Run the bucket once over an empty packet, then capture it. Waits for the device."""
        if bucket in self._graphs or not self._is_cuda:
            return
        began = time.perf_counter()
        self.rehearse(bucket)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with without_collections(), torch.cuda.graph(graph, pool=self._pool):
            self.step.launch(bucket, self._wire)
        self._graphs[bucket] = graph
        self.num_recorded += 1
        self.recording_s += time.perf_counter() - began


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected: graphs of an earlier executor may be in it, and to free one ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _sizes(small: tuple[int, ...], step: int, most: int) -> list[int]:
    larger = range(small[-1] + step, most, step)
    return [n for n in (*small, *larger) if n < most] + [most]


def _least(sizes: list[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
