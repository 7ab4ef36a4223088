"""The plain-torch kernel set: the oracle for every other one, and what runs where nothing faster is installed.

How it keeps the promise of `ops` (a row's bits depend on that row alone), each choice found by measurement:

- A matrix product runs over tiles of ROW_TILE rows, the last one padded with zeros, since the libraries below torch
  choose another order of additions for another number of rows. Should the place inside a tile matter too, which
  depends on the shape and the number of threads and is tried out once for each, that product runs on one thread.
- Attention multiplies one [G, D] query group with KEY_TILE keys at a time, the same shape for every query, and adds
  tiles in ascending order. A tile that is wholly masked adds +0 to sums that are never -0, which changes no bit.
- Only functions that compute an element alike wherever it lies in a tensor are used: exp, and what IEEE 754
  rounds exactly. torch's silu and sigmoid are not among them (their loop's tail differs from its body).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from headway.kernels.ops import KernelSet, PagedRows

ROW_TILE = 16
KEY_TILE = 128
QUERY_SLICE = 128  # queries of one chunk that share a pass; bounds the score matrix and skips keys of the future
GATHER_FLOATS = 4 * 1024 * 1024  # keys gathered at once for rows of one query


def load() -> KernelSet:
    """The plain-torch kernels."""
    return KernelSet(
        name="ref",
        layout="transposed-1",
        pack=pack,
        embed=embed,
        linear=TiledLinear(),
        rms_norm=rms_norm,
        rope=rope,
        write_kv=write_kv,
        attention=attention,
        silu_mul=silu_mul,
    )


def pack(w: Tensor) -> Tensor:
    """[out, in] -> [in, out]: with this side contiguous a tile of 16 rows runs two to five times faster."""
    return w.t().contiguous()


def embed(w: Tensor, tokens: Tensor) -> Tensor:
    return w.index_select(1, tokens).t().contiguous()


class TiledLinear:
    """From its first use on, every product of one shape runs the same way: the same tile and number of threads."""

    def __init__(self) -> None:
        self._runs_alone: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out: int) -> Tensor:
        threads = torch.get_num_threads()
        key = (*w.shape, threads)
        if key not in self._runs_alone:
            self._runs_alone[key] = threads > 1 and place_matters(w)
        if not self._runs_alone[key]:
            y = _multiply(x.contiguous(), w, out)
        else:
            torch.set_num_threads(1)
            try:
                y = _multiply(x.contiguous(), w, out)
            finally:
                torch.set_num_threads(threads)
        return y if bias is None else y.add_(bias)


def place_matters(w: Tensor) -> bool:
    """Whether equal rows of one tile come out unequal, as when threads share out the tile's rows unevenly. Seen with
    16 threads at [4864, 896]; never with one."""
    row = torch.arange(w.shape[0], dtype=torch.float32).sin_()
    y = torch.mm(row.expand(ROW_TILE, -1).contiguous(), w)
    return not torch.equal(y, y[:1].expand_as(y))


def _multiply(x: Tensor, w: Tensor, out: int) -> Tensor:
    count, width = x.shape
    full = count - count % ROW_TILE
    y = x.new_empty((full + ROW_TILE if full < count else full, out))
    for start in range(0, full, ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], w, out=y[start : start + ROW_TILE])
    if full < count:
        tile = x.new_zeros((ROW_TILE, width))
        tile[: count - full] = x[full:]
        torch.mm(tile, w, out=y[full:])
    return y[:count]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    c = cos.index_select(0, positions).unsqueeze(1)  # [T, 1, D/2]
    s = sin.index_select(0, positions).unsqueeze(1)
    for x in (q, k):
        a, b = x.chunk(2, dim=-1)
        turned = a * c - b * s
        b.copy_(b * c + a * s)
        a.copy_(turned)


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slot_map: Tensor) -> None:
    cells = kv_layer.flatten(1, 2)  # [2, cells, KVH, D], a view
    cells[0].index_copy_(0, slot_map, k)
    cells[1].index_copy_(0, slot_map, v)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.neg().exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up)


def attention(q: Tensor, kv_layer: Tensor, rows: PagedRows, scale: float) -> Tensor:
    q = q * scale
    out = torch.empty_like(q)
    starts = rows.query_start.tolist()
    context = rows.context.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    singles = sorted((row for row, count in enumerate(counts) if count == 1), key=context.__getitem__)
    kv_width = kv_layer.shape[-2] * kv_layer.shape[-1]
    for group in _groups(singles, context, GATHER_FLOATS // kv_width):
        index = torch.tensor([starts[row] for row in group])
        keys, values = _gather(kv_layer, rows, group, max(context[row] for row in group))
        out[index] = _attend(q[index], keys, values, rows.positions[index])
    for row, count in enumerate(counts):
        if count > 1:
            keys, values = _gather(kv_layer, rows, [row], context[row])
            for start in range(starts[row], starts[row] + count, QUERY_SLICE):
                part = slice(start, min(start + QUERY_SLICE, starts[row] + count))
                out[part] = _attend(q[part], keys, values, rows.positions[part])
    return out


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


def _gather(kv_layer: Tensor, rows: PagedRows, group: list[int], longest: int) -> tuple[Tensor, Tensor]:
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
    keys = flat[0].index_select(0, cells.flatten()).view(shape)
    values = flat[1].index_select(0, cells.flatten()).view(shape)
    # A probability of zero times NaN is NaN: what lies past the context must be finite.
    values.masked_fill_(beyond[..., None, None], 0.0)
    return keys, values


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
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
    spots = torch.arange(tiles * KEY_TILE).view(tiles, 1, 1, 1, KEY_TILE)
    scores.masked_fill_(spots > positions.view(count, 1, 1), float("-inf"))
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
