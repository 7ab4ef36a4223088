"""Paged attention alone: a layer's keys and values in every KV format, for decode rows and for a prompt.

    new 1, context n     decode rows: every key and value is read once, so memory bandwidth is the limit
    new n, context n     a prompt in one step: keys are read many times, so compute is the limit

Calls go through the layers in turn, so that large caches are read from memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headway.bench import machine
from headway.errors import EngineError
from headway.kernels.checks import Array
from headway.kernels.kv_format import KV_FORMATS, KVFormat
from headway.kernels.ops import KernelSet
from headway.models.batch import ForwardBatch
from headway.models.spec import ModelSpec
from headway.runner.kvstore import KVStore

BLOCK_SIZE = 16
LAYERS = 4
CASES = ((1, 1, 256), (1, 1, 1024), (8, 1, 512), (32, 1, 256), (32, 1, 512), (1, 128, 128), (1, 512, 512))
"""Rows, new tokens of each, context of each."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One call for one layer."""

    kv_dtype: str
    rows: int
    new: int
    context: int
    us: float
    gflops: float
    gb_s: float  # keys and values, each counted once


def measure_attention(spec: ModelSpec, kernels: KernelSet) -> Iterator[AttentionRow]:
    """Every case in every format this set of kernels can read."""
    for kind, (rows, new, context) in itertools.product(KV_FORMATS, CASES):
        row = _measure(spec, kernels, kind, (rows, new, min(context, spec.max_len)))
        if row is not None:
            yield row


def _measure(spec: ModelSpec, kernels: KernelSet, kind: KVFormat, case: tuple[int, int, int]) -> AttentionRow | None:
    rows, new, context = case
    num_blocks = rows * -(-context // BLOCK_SIZE)
    shape = {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    store = KVStore(layers=LAYERS, num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_dtype=kind.name, **shape)
    try:
        _fill(store.data, spec, kernels)
    except EngineError:
        return None  # an older library without this format
    batch = make_batch(rows, new, context)
    q = _normal(rows * new, spec.heads, spec.head_dim)
    turn = itertools.cycle(store.data)
    scale = spec.head_dim**-0.5
    seconds = machine.best_seconds(lambda: kernels.attention(q, next(turn), batch, scale), budget_s=0.15, least=4)
    keys_seen = rows * sum(range(context - new + 1, context + 1))
    flops = 4.0 * spec.heads * spec.head_dim * keys_seen
    num_bytes = 2.0 * rows * context * spec.kv_heads * kind.head_bytes(spec.head_dim)
    return AttentionRow(
        kv_dtype=kind.name,
        rows=rows,
        new=new,
        context=context,
        us=round(seconds * 1e6, 1),
        gflops=round(flops / seconds / 1e9, 2),
        gb_s=round(num_bytes / seconds / 1e9, 2),
    )


def _fill(kv: Array, spec: ModelSpec, kernels: KernelSet) -> None:
    cells = kv.shape[2] * kv.shape[3]
    new = _normal(cells, spec.kv_heads, spec.head_dim)
    for layer in kv:
        kernels.write_kv(new, new, layer, np.arange(cells))


def _normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def make_batch(rows: int, new: int, context: int) -> ForwardBatch:
    """Rows of `context` tokens each, of which this step computes the last `new`; blocks are in row order."""
    width = -(-context // BLOCK_SIZE)
    positions = np.tile(np.arange(context - new, context), rows)
    row_of = np.arange(rows, dtype=np.int32).repeat(new)
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    cells = tables[row_of, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        tokens=np.zeros(rows * new, np.int64),
        positions=positions,
        slot_map=cells,
        row_of=row_of,
        tables=tables,
        query_start=np.arange(0, rows * new + 1, new, dtype=np.int32),
        context=np.full(rows, context, np.int32),
        sample_index=np.zeros(0, np.int64),
        block_size=BLOCK_SIZE,
    )
