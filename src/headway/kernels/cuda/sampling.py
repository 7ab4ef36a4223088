"""Logits become tokens on the device: greedy choices and draws at a temperature. One read of the logits, no host.

    parts     per row and chunk of the vocabulary: largest logit, its token, sum of weights
    draw      one uniform number per row, a pure function of (key, position), inverted over chunks, then inside one

Rows that ask for more than a temperature are left to `special`, and plain rows with a mask are sampled again there. A
row's result depends on that row alone. Logits that are not finite give token 0 and a status bit: the token must be
legal, because the next step may be queued already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs
from headway.kernels.cuda.layout import COUNTER_MASK, MAX_STOPS, RECORD_WORDS, SEEN, Field, Flag, Status

CHUNK = 4096  # logits of one program
RECORD = tl.constexpr(RECORD_WORDS)
LENGTH = tl.constexpr(int(Field.LENGTH))
LAST = tl.constexpr(int(Field.LAST))
KEY_LOW = tl.constexpr(int(Field.KEY_LOW))
KEY_HIGH = tl.constexpr(int(Field.KEY_HIGH))
TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
FLAGS = tl.constexpr(int(Field.FLAGS))
NUM_STOPS = tl.constexpr(int(Field.NUM_STOPS))
SPECIAL = tl.constexpr(int(Flag.SPECIAL))
COUNTED = tl.constexpr(int(Flag.COUNTED))
STOPPED = tl.constexpr(int(Status.STOPPED))
NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
_STOPS = tl.constexpr(MAX_STOPS)
_SEEN = tl.constexpr(SEEN)
_COUNTER_MASK = tl.constexpr(COUNTER_MASK)


@triton.jit
def real(word):
    return word.to(tl.float32, bitcast=True)


@triton.jit
def uniform(record, place):
    """The same 53-bit number in [0, 1) as `runner.rng.uniform`: of the row's key and the position to be sampled."""
    low = tl.load(record + KEY_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + KEY_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (high << 32 | low) + (place.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def commit(record, place, stops, counts, row, token, status, out, V):
    """Report the token with its status and whether it ends the request; behind all of the row's, make it the newest."""
    s = tl.arange(0, _STOPS)
    ids = tl.load(stops + row * _STOPS + s, mask=s < tl.load(record + NUM_STOPS), other=-1)
    is_end = tl.sum((ids == token).to(tl.int32), 0) > 0
    tl.store(out, token | status | tl.where(is_end & (status == 0), STOPPED, 0))
    is_newest = place == tl.load(record + LENGTH)
    tl.store(record + LAST, token, mask=is_newest)
    if ((tl.load(record + FLAGS) & COUNTED) != 0) & is_newest:
        seen = counts + row.to(tl.int64) * V + token
        tl.store(seen, (tl.load(seen) + 1) | _SEEN)


@triton.jit
def parts(logits, sampled_rows, records, part_max, part_token, part_sum, V, NC, CH: tl.constexpr, PDL: tl.constexpr):
    """A chunk with a NaN in it has an infinite largest logit."""
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    temperature = real(tl.load(records + tl.load(sampled_rows + i) * RECORD + TEMPERATURE))
    v = c * CH + tl.arange(0, CH)
    x = tl.load(logits + i * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    is_sick = tl.sum((x != x).to(tl.int32), 0) > 0
    top, at = tl.max(x, 0, return_indices=True)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(part_max + i * NC + c, tl.where(is_sick, float("inf"), top))
    tl.store(part_token + i * NC + c, c * CH + at)
    tl.store(part_sum + i * NC + c, tl.sum(tl.exp((x - safe) * scale), 0))


@triton.jit
def draw(
    logits, sampled_rows, places, records, stops, counts, part_max, part_token, part_sum, out, V, NC,
    CH: tl.constexpr, NP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows whose record says nothing but a temperature; 0 is greedy, of equals the lowest id. A mask comes later."""
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(sampled_rows + i)
    record = records + row * RECORD
    place = tl.load(places + i)
    if (tl.load(record + FLAGS) & SPECIAL) == 0:
        temperature = real(tl.load(record + TEMPERATURE))
        c = tl.arange(0, NP)
        peaks = tl.load(part_max + i * NC + c, mask=c < NC, other=-float("inf"))
        top = tl.max(peaks, 0)
        status = tl.where((top == float("inf")) | (top == -float("inf")), NOT_FINITE, 0)
        if (temperature > 0.0) & (status == 0):
            scale = 1.0 / temperature
            mass = tl.load(part_sum + i * NC + c, mask=c < NC, other=0.0) * tl.exp((peaks - top) * scale)
            token = _invert(logits + i * V, mass.to(tl.float64), c, top, scale, uniform(record, place), V, NC, CH)
        else:
            ids = tl.load(part_token + i * NC + c, mask=c < NC, other=2147483647)
            token = tl.min(tl.where(peaks == top, ids, 2147483647), 0)
        token = tl.where(status == 0, token, 0)
        commit(record, place, stops, counts, row, token, status, out + i, V)


@triton.jit
def _invert(line, mass, c, top, scale, u, V, NC, CH: tl.constexpr):
    """The token at u of the cumulated weights, with sums in float64: the chunk first, then the place in it."""
    target = u * tl.sum(mass, 0)
    chunk = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0), NC - 1)
    rest = target - tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    j = tl.arange(0, CH)
    v = chunk * CH + j
    x = tl.load(line + v, mask=v < V, other=-float("inf")).to(tl.float32)
    weight = tl.exp((x - top) * scale).to(tl.float64)
    at = tl.sum((tl.cumsum(weight, 0) <= rest).to(tl.int32), 0)
    # Chunk sums and this one round differently: a target at the very end belongs to the last real weight.
    last = tl.max(tl.where(weight > 0.0, j, 0), 0)
    return chunk * CH + tl.minimum(at, last)


@triton.jit(do_not_specialize=["N"])
def publish(
    tokens, out_ring, flags, counter, began, times, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr
):
    """Copy the step's tokens to pinned memory with the nanoseconds of its begin and end, then raise its flag.

    One program. The flag is released to the whole system behind a barrier: a host that sees it sees what every thread
    of this kernel, and every kernel before it, wrote.
    """
    c = tl.load(counter)
    slot = (c % SLOTS).to(tl.int64)
    following = (c + 1) & _COUNTER_MASK
    i = tl.arange(0, BLOCK)
    tl.store(out_ring + slot * BLOCK + i, tl.load(tokens + i, mask=i < N, other=0), mask=i < N)
    if CLOCK:
        tl.store(times + slot * 2, tl.load(began))
        tl.store(times + slot * 2 + 1, tl.extra.cuda.globaltimer().to(tl.int64))
    tl.debug_barrier()
    tl.store(counter, following)
    tl.store(began, 0)
    tl.atomic_xchg(flags + slot, following, sem="release", scope="sys")
