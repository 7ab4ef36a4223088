"""A plan becomes words in pinned memory: what `kernels.cuda.layout` describes, written into one slot of a ring.

Owns the packing alone. Rows were checked before; nothing here waits for the device. A slot is written again only after
the step that read it was collected.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from headway.errors import EngineError
from headway.kernels.cuda.attention import host_segment_cells, is_aligned
from headway.kernels.cuda.layout import HEADER_WORDS, ITEM_WORDS, Header
from headway.runner.cuda.state import Pokes
from headway.values.plan import Chunk

Words = NDArray[np.int32]
_DEEP = 1024  # cells: what ends before is done soon enough


@dataclass(frozen=True, slots=True)
class PacketShape:
    """Sizes a packet must have room for."""

    rows: int
    tokens: int
    queries: int  # most tokens of a prefill item
    ends: tuple[int, ...]  # ascending: no item reaches over one of these positions
    busy: int = 0  # so many prefill items fill the device: fewer are cut into parts
    parts: int = 0  # that there is room for
    pokes: int = 1 << 15
    mask: int = 0  # words of a row's mask

    @property
    def items(self) -> int:
        return self.tokens // self.queries + self.tokens // 256 + 2 * self.rows

    @property
    def num_words(self) -> int:
        items = ITEM_WORDS * (self.items + self.parts)
        masks = self.rows * (1 + self.mask)
        words = HEADER_WORDS + 6 * self.rows + 3 * self.tokens + items + masks + 2 * self.pokes
        return -(-words // 64) * 64


@dataclass(frozen=True, slots=True)
class Packed:
    """What a packet asks of the device: decode rows, tokens of chunks, entries that are sampled."""

    num_decode: int
    num_tokens: int
    num_samples: int  # decode rows included

    @property
    def is_mixed(self) -> bool:
        return self.num_tokens > 0 or self.num_samples > self.num_decode


def pack(
    words: Words,
    shape: PacketShape,
    decode: NDArray[np.int64],
    chunks: Sequence[Chunk],
    samples: Sequence[tuple[int, int, int]],
    tokens: NDArray[np.int32],
    pokes: Pokes,
    masks: Mapping[int, Words],
) -> Packed:
    """Write the packet of these rows and chunks.

    `samples` are (token of the step, row, position), `tokens` is [rows, length], `masks` are by sampled entry.
    """
    num_decode = len(decode)
    words[HEADER_WORDS : HEADER_WORDS + num_decode] = decode
    at = HEADER_WORDS + num_decode
    num_tokens = num_items = 0
    if chunks:
        num_tokens = sum(chunk.count for chunk in chunks)
        at = _put_tokens(words, at, chunks, num_tokens, tokens)
        at = _put(words, at, Header.CHUNKS, [value for c in chunks for value in (c.row, c.start + c.count)])
        at = _put(words, at, Header.SAMPLES, [value for sample in samples for value in sample])
        items = _cut(shape, _items(shape, num_decode, chunks))
        num_items = len(items) // ITEM_WORDS
        at = _put(words, at, Header.ITEMS, items)
    words[Header.NUM_DECODE], words[Header.NUM_TOKENS], words[Header.NUM_CHUNKS] = num_decode, num_tokens, len(chunks)
    words[Header.NUM_SAMPLES], words[Header.NUM_ITEMS] = len(samples), num_items
    words[Header.NUM_MASKED] = num_decode + len(samples) if masks else 0
    if masks:
        at = _put_masks(words, at, num_decode + len(samples), masks)
    words[Header.NUM_WORDS], words[Header.NUM_POKES], words[Header.POKES] = at, len(pokes), at
    if pokes:
        num = len(pokes)
        words[at : at + num] = np.fromiter(pokes.keys(), np.int32, num)
        words[at + num : at + 2 * num] = np.fromiter(pokes.values(), np.int32, num)
    return Packed(num_decode, num_tokens, num_decode + len(samples))


def mask_lines(mask: bytes, vocab_size: int, num_words: int) -> Sequence[Words]:
    """A row's masks as words: one behind its known tokens, and one behind each draft."""
    wanted = -(-vocab_size // 8)
    if not mask or len(mask) % wanted:
        raise EngineError(f"a mask has {len(mask)} bytes; {vocab_size} tokens take {wanted}")
    lines = [mask[at : at + wanted] for at in range(0, len(mask), wanted)]
    return [np.frombuffer(line.ljust(4 * num_words, b"\0"), "<i4") for line in lines]


def by_entry(masks: Mapping[int, Sequence[Words]], sampled: Sequence[int]) -> dict[int, Words]:
    """The masks of a step's sampled entries, whose rows these are. A mask that is missing behind others allows nothing:
    its row fails."""
    lines = {row: chain(mine, repeat(np.zeros_like(mine[0]))) for row, mine in masks.items()}
    return {i: next(lines[row]) for i, row in enumerate(sampled) if row in lines}


def _put(words: Words, at: int, where: Header, values: Sequence[int]) -> int:
    words[where] = at
    if values:
        words[at : at + len(values)] = values
    return at + len(values)


def _put_masks(words: Words, at: int, num: int, masks: Mapping[int, Words]) -> int:
    words[Header.MASKS] = at
    places = words[at : at + num]
    places[:] = 0
    at += num
    for entry, mask in masks.items():
        places[entry] = at
        words[at : at + len(mask)] = mask
        at += len(mask)
    return at


def _put_tokens(words: Words, at: int, chunks: Sequence[Chunk], num: int, tokens: NDArray[np.int32]) -> int:
    words[Header.TOKENS], words[Header.POSITIONS], words[Header.TOKEN_ROWS] = at, at + num, at + 2 * num
    for chunk in chunks:
        start, end, count = chunk.start, chunk.start + chunk.count, chunk.count
        words[at : at + count] = tokens[chunk.row, start:end]
        words[at + num : at + num + count] = np.arange(start, end, dtype=np.int32)
        words[at + 2 * num : at + 2 * num + count] = chunk.row
        at += count
    return at + 2 * num


def _cut(shape: PacketShape, items: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The words of all items. Where they would leave the device idle, those deep in a prompt are cut into segments:
    one program needs 8 ms for 4,000 cells of llama-3.1-8b's layers, however few tokens it has."""
    words: list[int] = []
    parts = groups = 0
    is_idle = len(items) < shape.busy
    for item in items:
        _, count, _, position = item
        end = position + count
        num = -(-end // host_segment_cells(end)) if is_idle and end > _DEEP else 1
        if num == 1 or parts + num > shape.parts or groups == shape.rows:
            words += (*item, -1, 0, 0, 0)
            continue
        for segment in range(num):
            words += (*item, segment, parts + segment, parts, groups)
        parts, groups = parts + num, groups + 1
    return words


def _items(shape: PacketShape, num_decode: int, chunks: Sequence[Chunk]) -> list[tuple[int, int, int, int]]:
    """(first token, tokens, row, first position) of every prefill item."""
    items: list[tuple[int, int, int, int]] = []
    token = num_decode
    aligned = is_aligned(shape.queries)
    for chunk in chunks:
        position, end = chunk.start, chunk.start + chunk.count
        while position < end:
            border = bisect_right(shape.ends, position)
            size = shape.queries - (position % shape.queries if aligned else 0)
            stop = min(end, position + size, *shape.ends[border : border + 1])
            items.append((token, stop - position, chunk.row, position))
            token += stop - position
            position = stop
    return items
