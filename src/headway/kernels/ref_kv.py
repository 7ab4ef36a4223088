"""The paged KV memory in plain torch: the oracle of every kernel that writes cells or attends over them.

Keys and values are widened to float32 when they are gathered; from there on every format is computed alike.

How attention guarantees exactness: it multiplies one [G, D] query group with KEY_TILE keys at a time, the same shape
for every query, and adds tiles in ascending order. A tile that is wholly masked adds +0 to sums that are never
-0, which changes no bit. One product is one thread's work, and D is filled up with zeros to whole cache lines: the
libraries below torch add in another order where threads share a product, and on some processors where an operand
starts elsewhere in its line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.kernels.kv_format import INT8
from headway.kernels.ops import PagedRows
from headway.kernels.threads import one_thread

KEY_TILE = 128
LINE = 16  # floats of a cache line
QUERY_SLICE = 128  # queries of one chunk that share a pass; bounds the score matrix and skips keys of the future
GATHER_FLOATS = 4 * 1024 * 1024  # keys gathered at once for rows of one query


@dataclass(frozen=True, slots=True)
class _Rows:
    """What attention needs of `PagedRows`, as tensors over the same memory."""

    positions: Tensor
    tables: Tensor
    query_start: Tensor
    context: Tensor
    block_size: int

    @classmethod
    def of(cls, rows: PagedRows) -> _Rows:
        return cls(
            positions=torch.from_numpy(rows.positions),
            tables=torch.from_numpy(rows.tables),
            query_start=torch.from_numpy(rows.query_start),
            context=torch.from_numpy(rows.context),
            block_size=rows.block_size,
        )


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of what a query sees and of its scores; 0: none."""

    window: int
    cap: float


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] float32 as records of the KV format whose tensors have that dtype.

    int8: scale = largest magnitude / 127, bytes = x / scale rounded half to even, the scale's four bytes in front. A
    head with an element that is not finite gets a scale that is not a number: it must not read as finite numbers.
    """
    if dtype != torch.uint8:
        return x.to(dtype)
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    scale = scale.masked_fill(~x.isfinite().all(-1, keepdim=True), float("nan"))
    steps = (x / scale.where(scale > 0, 1.0)).round_().nan_to_num_(nan=-127.0).clamp_(-127.0, 127.0)
    return torch.cat((scale.view(torch.uint8), steps.to(torch.int8).view(torch.uint8)), -1)


def widen(records: Tensor) -> Tensor:
    """What `narrow` made, as float32 [..., D]."""
    if records.dtype != torch.uint8:
        return records.float()
    scale = records[..., : INT8.prefix].contiguous().view(torch.float32)
    return records[..., INT8.prefix :].view(torch.int8).float() * scale


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slot_map: Tensor) -> None:
    cells = kv_layer.flatten(1, 2)  # [2, cells, KVH, record], a view
    for side, new in zip(cells, (k, v), strict=True):
        side.index_copy_(0, slot_map, narrow(new, kv_layer.dtype))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), tanh by exp alone: an element's bits do not depend on where it lies."""
    small = x.abs().mul_(-2.0 / cap).exp_()
    return (1.0 - small).div_(small.add_(1.0)).mul_(cap).copysign_(x)


def attention(q: Tensor, kv_layer: Tensor, batch: PagedRows, scale: float, window: int = 0, cap: float = 0.0) -> Tensor:
    rows, limits = _Rows.of(batch), _Limits(window, cap)
    width = q.shape[-1]
    q = _whole_lines(q * scale)
    out = torch.empty_like(q)
    starts = rows.query_start.tolist()
    context = rows.context.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    singles = sorted((row for row, count in enumerate(counts) if count == 1), key=context.__getitem__)
    kv_width = kv_layer.shape[-2] * q.shape[-1]
    for group in _groups(singles, context, GATHER_FLOATS // kv_width):
        index = torch.tensor([starts[row] for row in group])
        keys, values = _gather(kv_layer, rows, group, max(context[row] for row in group))
        out[index] = _share_out(q[index], keys, values, rows.positions[index], limits)
    for row, count in enumerate(counts):
        if count > 1:
            keys, values = _gather(kv_layer, rows, [row], context[row])
            for start in range(starts[row], starts[row] + count, QUERY_SLICE):
                part = slice(start, min(start + QUERY_SLICE, starts[row] + count))
                out[part] = _share_out(q[part], keys, values, rows.positions[part], limits)
    return out[..., :width].contiguous()


def _whole_lines(x: Tensor) -> Tensor:
    spare = -x.shape[-1] % LINE
    return pad(x, (0, spare)) if spare else x


def _groups(order: list[int], context: list[int], max_cells: int) -> Iterator[list[int]]:
    """Cut rows of ascending context into groups that gather at most `max_cells`, padding included."""
    group: list[int] = []
    for row in order:
        if group and (len(group) + 1) * _padded(context[row]) > max_cells:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _padded(cells: int) -> int:
    return -(-cells // KEY_TILE) * KEY_TILE


def _gather(kv_layer: Tensor, rows: _Rows, group: list[int], longest: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some rows as [len(group), L, KVH, D], L whole tiles; values past a row's context are 0."""
    index = torch.tensor(group)
    spots = torch.arange(_padded(longest))
    tables = rows.tables[index].long()
    block = tables.index_select(1, (spots // rows.block_size).clamp_(max=tables.shape[1] - 1))
    cells = block * rows.block_size + spots % rows.block_size  # [len(group), L]
    beyond = spots >= rows.context[index].unsqueeze(1)
    cells.masked_fill_(beyond, 0)
    flat = kv_layer.flatten(1, 2)
    shape = (*cells.shape, *flat.shape[2:])
    keys, values = (_whole_lines(widen(side.index_select(0, cells.flatten()).view(shape))) for side in flat)
    # A probability of zero times NaN is NaN: what lies past the context must be finite.
    values.masked_fill_(beyond[..., None, None], 0.0)
    return keys, values


def _share_out(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, limits: _Limits) -> Tensor:
    """`_attend` on all threads if each has a query of its own, else on one."""
    with one_thread(len(q) < torch.get_num_threads()):
        return _attend(q, keys, values, positions, limits)


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, limits: _Limits) -> Tensor:
    """q [n, H, D] over keys and values [n or 1, L, KVH, D]; one row of them serves all queries of a chunk."""
    count, heads, width = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    tiles = _padded(int(positions.max()) + 1) // KEY_TILE
    q = q.view(count, kv_heads, group, width)
    scores = q.new_empty((tiles, kv_heads, count, group, KEY_TILE))
    for tile in range(tiles):
        span = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
        for head in range(kv_heads):
            side = keys[:, span, head].transpose(1, 2).expand(count, width, KEY_TILE)
            torch.bmm(q[:, head], side, out=scores[tile, head])
    if limits.cap:
        scores = soft_cap(scores, limits.cap)
    spots = torch.arange(tiles * KEY_TILE).view(tiles, 1, 1, 1, KEY_TILE)
    scores.masked_fill_(spots > positions.view(count, 1, 1), float("-inf"))
    if limits.window:
        scores.masked_fill_(spots <= positions.view(count, 1, 1) - limits.window, float("-inf"))
    scores.sub_(scores.amax(dim=(0, 4), keepdim=True)).exp_()
    tile_sums = scores.sum(-1, keepdim=True)  # [tiles, KVH, n, G, 1]
    total = torch.zeros_like(tile_sums[0])
    mixed = q.new_zeros((kv_heads, count, group, width))
    for tile in range(tiles):
        span = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
        total += tile_sums[tile]
        for head in range(kv_heads):
            mixed[head] += torch.bmm(scores[tile, head], values[:, span, head].expand(count, KEY_TILE, width))
    return mixed.div_(total).transpose(0, 1).reshape(count, heads, width)
