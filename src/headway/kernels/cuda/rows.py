"""The inputs of a step, made on the device from the packet and from what the device keeps of every row.

Owns the way from plan words to what the decoder's kernels read: token, position and cell of every token, the entries
that are sampled, the work list of decode attention. Rows advance here: a decode row by one cell, a chunk to its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.attention import segment_cells
from headway.kernels.cuda.layout import RECORD_WORDS, Field, Header

_RECORD = tl.constexpr(RECORD_WORDS)
_LENGTH = tl.constexpr(int(Field.LENGTH))
_LAST = tl.constexpr(int(Field.LAST))
_NUM_DECODE = tl.constexpr(int(Header.NUM_DECODE))
_NUM_TOKENS = tl.constexpr(int(Header.NUM_TOKENS))
_NUM_CHUNKS = tl.constexpr(int(Header.NUM_CHUNKS))
_NUM_SAMPLES = tl.constexpr(int(Header.NUM_SAMPLES))
_NUM_POKES = tl.constexpr(int(Header.NUM_POKES))
_NUM_WORDS = tl.constexpr(int(Header.NUM_WORDS))
_TOKENS = tl.constexpr(int(Header.TOKENS))
_POSITIONS = tl.constexpr(int(Header.POSITIONS))
_TOKEN_ROWS = tl.constexpr(int(Header.TOKEN_ROWS))
_CHUNKS = tl.constexpr(int(Header.CHUNKS))
_SAMPLES = tl.constexpr(int(Header.SAMPLES))
_POKES = tl.constexpr(int(Header.POKES))
_HEADER = tl.constexpr(32)


@triton.jit
def fetch(ring, counter, packet, state, began, SIZE, SLOTS: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr):
    """Copy the step's packet from pinned memory to the device and apply its pokes to the state."""
    base = ring + (tl.load(counter) % SLOTS).to(tl.int64) * SIZE
    pid = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    if CLOCK:  # noqa: SIM102  # known when this is compiled, unlike what follows
        if (pid == 0) & (tl.load(began) == 0):
            tl.store(began, tl.extra.cuda.globaltimer().to(tl.int64))
    num_words = tl.load(base + _NUM_WORDS)
    for start in range(pid * BLOCK, num_words, stride):
        i = start + tl.arange(0, BLOCK)
        tl.store(packet + i, tl.load(base + i, mask=i < num_words), mask=i < num_words)
    num_pokes = tl.load(base + _NUM_POKES)
    pokes = base + tl.load(base + _POKES)
    for start in range(pid * BLOCK, num_pokes, stride):
        i = start + tl.arange(0, BLOCK)
        here = i < num_pokes
        at = tl.load(pokes + i, mask=here, other=0)
        tl.store(state + at, tl.load(pokes + num_pokes + i, mask=here, other=0), mask=here)


@triton.jit
def start_clock(began):
    """The step begins here, with what is queued before its packet is fetched."""
    tl.store(began, tl.extra.cuda.globaltimer().to(tl.int64))


@triton.jit(do_not_specialize=["num"])
def poke(pokes, state, num, BLOCK: tl.constexpr):
    """Pokes that found no room in a packet: offsets, then values."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(pokes + i, mask=i < num, other=0)
    tl.store(state + at, tl.load(pokes + num + i, mask=i < num, other=0), mask=i < num)


@triton.jit(do_not_specialize=["PAD", "NUM_TURNS", "NUM_ROWS", "PROGRAMS"])
def prepare_decode(
    packet, records, tables, tokens, positions, slot_map, sampled, sampled_rows, places, items, num_items, turns, TW,
    PAD, NUM_TURNS, NUM_ROWS, PROGRAMS, KVH: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode rows are the first entries and tokens of a step; up to PAD of each are written.

    A row is an item of its own, or one item per segment. It is cut if it is longer than an even share of all cells
    among PROGRAMS; and, where rows are about equally long, if it is one of those left over after every program had the
    same number of rows and these would leave many programs idle. Long items come first.
    """
    b = tl.arange(0, BLOCK)
    n = tl.load(packet + _NUM_DECODE)
    is_row = b < n
    is_pad = b < PAD
    row = tl.load(packet + _HEADER + b, mask=is_row, other=NUM_ROWS)
    record = records + row * _RECORD
    length = tl.load(record + _LENGTH, mask=is_row, other=0)
    token = tl.load(record + _LAST, mask=is_row, other=0)
    block = tl.load(tables + row.to(tl.int64) * TW + length // BS, mask=is_row, other=0)
    tl.store(tokens + b, token, mask=is_row | is_pad)
    tl.store(positions + b, length, mask=is_row | is_pad)
    tl.store(slot_map + b, tl.where(is_row, block * BS + length % BS, -1), mask=is_row | is_pad)
    tl.store(sampled + b, b, mask=is_row | is_pad)
    tl.store(sampled_rows + b, row, mask=is_row | is_pad)
    after = tl.where(is_row, length + 1, 0)
    tl.store(places + b, after, mask=is_row | is_pad)
    tl.store(record + _LENGTH, after, mask=is_row)
    share = (tl.sum(after.to(tl.int64), 0) * KVH // PROGRAMS).to(tl.int32)
    left = (n * KVH) % PROGRAMS
    is_even = tl.max(after, 0).to(tl.int64) * n * 2 < tl.sum(after.to(tl.int64), 0) * 3
    is_tail = (b >= (n * KVH - left) // KVH) & is_even & (left * 10 < PROGRAMS * 7)
    is_cut = (after > share) | is_tail
    cells_each = tl.where(is_cut, segment_cells(after), after)
    num = tl.where(is_row, tl.where(is_cut, tl.cdiv(after, cells_each), 1), 0)
    rank = tl.minimum(cells_each * 8 // (share + 1), 7)
    first = tl.zeros([BLOCK], tl.int32)
    total = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for r in range(0, 8):
        mine = tl.where(rank == 7 - r, num, 0)
        first = tl.where(rank == 7 - r, total + tl.cumsum(mine, 0) - mine, first)
        total += tl.sum(mine, 0)
    most = tl.max(num, 0)
    for s in range(0, most):
        item = items + 8 * (first + s)
        tl.store(item, b, mask=s < num)
        tl.store(item + 1, tl.where(num == 1, -1, s), mask=s < num)
        tl.store(item + 2, row, mask=s < num)
        tl.store(item + 3, after, mask=s < num)
        tl.store(item + 4, first, mask=s < num)
    tl.store(num_items, total)
    for start in range(0, NUM_TURNS, BLOCK):
        tl.store(turns + start + b, tl.zeros([BLOCK], tl.int32), mask=start + b < NUM_TURNS)


@triton.jit(do_not_specialize=["NUM_TOKENS", "PAD", "NUM_ROWS"])
def prepare_chunks(
    packet, records, tables, tokens, positions, slot_map, sampled, sampled_rows, places, TW, NUM_TOKENS, PAD, NUM_ROWS,
    BS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Tokens of chunks follow the decode rows; NUM_TOKENS tokens and PAD samples of the step are written in all."""
    num_decode = tl.load(packet + _NUM_DECODE)
    num_tokens = tl.load(packet + _NUM_TOKENS)
    k = tl.arange(0, BLOCK)
    t = tl.program_id(0) * BLOCK + k
    j = t - num_decode
    is_token = (j >= 0) & (j < num_tokens)
    is_pad = (j >= 0) & (t < NUM_TOKENS)
    row = tl.load(packet + tl.load(packet + _TOKEN_ROWS) + j, mask=is_token, other=0).to(tl.int64)
    position = tl.load(packet + tl.load(packet + _POSITIONS) + j, mask=is_token, other=0)
    block = tl.load(tables + row * TW + position // BS, mask=is_token, other=0)
    tl.store(tokens + t, tl.load(packet + tl.load(packet + _TOKENS) + j, mask=is_token, other=0), mask=is_pad)
    tl.store(positions + t, position, mask=is_pad)
    tl.store(slot_map + t, tl.where(is_token, block * BS + position % BS, -1), mask=is_pad)
    if tl.program_id(0) == 0:
        chunks = packet + tl.load(packet + _CHUNKS)
        num_chunks = tl.load(packet + _NUM_CHUNKS)
        for start in range(0, num_chunks, BLOCK):
            c = start + k
            owner = tl.load(chunks + 2 * c, mask=c < num_chunks, other=0)
            end = tl.load(chunks + 2 * c + 1, mask=c < num_chunks, other=0)
            tl.store(records + owner * _RECORD + _LENGTH, end, mask=c < num_chunks)
        samples = packet + tl.load(packet + _SAMPLES)
        num_samples = tl.load(packet + _NUM_SAMPLES)
        for start in range(0, PAD, BLOCK):
            f = start + k - num_decode
            is_sample = (f >= 0) & (f < num_samples)
            put = (f >= 0) & (start + k < PAD)
            tl.store(sampled + start + k, tl.load(samples + 3 * f, mask=is_sample, other=0), mask=put)
            owner = tl.load(samples + 3 * f + 1, mask=is_sample, other=NUM_ROWS)
            tl.store(sampled_rows + start + k, owner, mask=put)
            tl.store(places + start + k, tl.load(samples + 3 * f + 2, mask=is_sample, other=0), mask=put)
