"""Sampling for rows that ask for more than a temperature, on the device, one program per row.

    mask -> bias -> penalties -> min_tokens -> temperature -> top-k -> top-p -> min-p -> draw at (key, position)

The steps and their order are those of `runner.sampler`, which is the oracle. Sets of likeliest tokens are found without
sorting: the smallest kept score is fixed bit by bit, each bit by one pass over the scores. Log probabilities are the
model's own, taken before all of the above. Plain rows return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs
from headway.kernels.cuda.layout import MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, SEEN, Field, Header, Status
from headway.kernels.cuda.sampling import (
    COUNTED,
    FLAGS,
    NOT_FINITE,
    NUM_STOPS,
    RECORD,
    SPECIAL,
    TEMPERATURE,
    commit,
    real,
    uniform,
)

_TOP_K = tl.constexpr(int(Field.TOP_K))
_TOP_P = tl.constexpr(int(Field.TOP_P))
_MIN_P = tl.constexpr(int(Field.MIN_P))
_REPETITION = tl.constexpr(int(Field.REPETITION))
_PRESENCE = tl.constexpr(int(Field.PRESENCE))
_FREQUENCY = tl.constexpr(int(Field.FREQUENCY))
_STOPS_FROM = tl.constexpr(int(Field.STOPS_FROM))
_NUM_BIASES = tl.constexpr(int(Field.NUM_BIASES))
_LOGPROBS = tl.constexpr(int(Field.LOGPROBS))
_MASKED = tl.constexpr(int(Status.MASKED))
_NUM_MASKED = tl.constexpr(int(Header.NUM_MASKED))
_MASKS = tl.constexpr(int(Header.MASKS))
_BIASES = tl.constexpr(MAX_BIASES)
_STOPS = tl.constexpr(MAX_STOPS)
_ENTRIES = tl.constexpr(MAX_LOGPROBS + 1)
_SEEN = tl.constexpr(SEEN)
_NEVER = tl.constexpr(2147483647)
_MIN_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit(do_not_specialize=["LINES"])
def special(
    logits, scratch, sampled_rows, places, packet, records, stops, bias_ids, bias_values, counts, out, lp_values,
    lp_ids, counter, V, LINES, SLOTS: tl.constexpr, CH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Everything for one sampled row; scratch holds its scores as float32."""
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(sampled_rows + i)
    record = records + row * RECORD
    place = tl.load(places + i)
    mask = _mask_of(packet, i)
    if ((tl.load(record + FLAGS) & SPECIAL) != 0) | (mask != 0):
        line = logits + i * V
        scores = scratch + i * V
        top, _, sick = _largest(line, V, CH)
        status = tl.where((sick > 0) | (top == float("inf")) | (top == -float("inf")), NOT_FINITE, 0)
        token = 0
        if status == 0:
            _put_scores(line, scores, packet, mask, V, CH)
            _adjust(scores, record, place, stops, bias_ids, bias_values, counts, row, V, CH)
            peak, token, _ = _largest(scores, V, CH)
            if peak == -float("inf"):
                status = _MASKED
                token = 0
            elif real(tl.load(record + TEMPERATURE)) > 0.0:
                token = _choose(scores, record, place, peak, V, CH)
            wanted = tl.load(record + _LOGPROBS)
            if wanted > 0:
                at = ((tl.load(counter) % SLOTS).to(tl.int64) * LINES + i) * _ENTRIES
                _report(line, top, token, wanted - 1, lp_values + at, lp_ids + at, V, CH)
        commit(record, place, stops, counts, row, token, status, out + i, V)


@triton.jit
def _mask_of(packet, i):
    """Where the mask of the step's sampled entry i begins in the packet; 0: it has none."""
    return tl.load(packet + tl.load(packet + _MASKS) + i, mask=i < tl.load(packet + _NUM_MASKED), other=0)


@triton.jit
def _largest(x, V, CH: tl.constexpr):
    """The largest value, the lowest id that has it, and how many are not numbers."""
    top = -float("inf")
    at = 0
    sick = 0
    for start in range(0, V, CH):
        v = start + tl.arange(0, CH)
        values = tl.load(x + v, mask=v < V, other=-float("inf")).to(tl.float32)
        sick += tl.sum((values != values).to(tl.int32), 0)
        here = tl.max(values, 0)
        if here > top:
            at = tl.min(tl.where(values == here, v, _NEVER), 0)
            top = here
    return top, at, sick


@triton.jit
def _put_scores(line, scores, packet, mask, V, CH: tl.constexpr):
    """The logits that a mask allows; all of them where it begins at 0."""
    for start in range(0, V, CH):
        v = start + tl.arange(0, CH)
        x = tl.load(line + v, mask=v < V, other=0.0).to(tl.float32)
        word = tl.load(packet + mask + v // 32, mask=(v < V) & (mask > 0), other=-1)
        tl.store(scores + v, tl.where(((word >> (v % 32)) & 1) > 0, x, -float("inf")), mask=v < V)
    tl.debug_barrier()


@triton.jit
def _adjust(scores, record, place, stops, bias_ids, bias_values, counts, row, V, CH: tl.constexpr):
    num = tl.load(record + _NUM_BIASES)
    if num > 0:
        j = tl.arange(0, _BIASES)
        ids = tl.load(bias_ids + row * _BIASES + j, mask=j < num, other=0)
        shift = real(tl.load(bias_values + row * _BIASES + j, mask=j < num, other=0))
        tl.store(scores + ids, tl.load(scores + ids, mask=j < num, other=0.0) + shift, mask=j < num)
        tl.debug_barrier()
    if (tl.load(record + FLAGS) & COUNTED) != 0:
        _penalize(scores, record, counts + row.to(tl.int64) * V, V, CH)
        tl.debug_barrier()
    if place < tl.load(record + _STOPS_FROM):
        s = tl.arange(0, _STOPS)
        here = s < tl.load(record + NUM_STOPS)
        ids = tl.load(stops + row * _STOPS + s, mask=here, other=0)
        tl.store(scores + ids, tl.full([_STOPS], -float("inf"), tl.float32), mask=here)
        tl.debug_barrier()


@triton.jit
def _penalize(scores, record, counts, V, CH: tl.constexpr):
    repetition = real(tl.load(record + _REPETITION))
    presence = real(tl.load(record + _PRESENCE))
    frequency = real(tl.load(record + _FREQUENCY))
    for start in range(0, V, CH):
        v = start + tl.arange(0, CH)
        x = tl.load(scores + v, mask=v < V, other=0.0)
        count = tl.load(counts + v, mask=v < V, other=0)
        x = tl.where(count >= _SEEN, tl.where(x > 0, x / repetition, x * repetition), x)
        times = (count & (_SEEN - 1)).to(tl.float32)
        x = tl.where(times > 0, x - (presence + frequency * times), x)
        tl.store(scores + v, x, mask=v < V)


@triton.jit
def _order(x):
    """An unsigned number that grows with x: the floats of either sign in their order, and one for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _float(order):
    """The score that `_order` gave this number."""
    bits = tl.where(order >= 0x80000000, order & 0x7FFFFFFF, order ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _above(scores, bound, peak, scale, V, CH: tl.constexpr):
    """How many scores lie at or above the bound, an `_order`, and their weight; the largest score weighs 1."""
    num = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, V, CH):
        v = start + tl.arange(0, CH)
        x = tl.load(scores + v, mask=v < V, other=-float("inf"))
        is_in = (_order(x) >= bound) & (v < V)
        num += tl.sum(is_in.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_in, tl.exp((x - peak) * scale), 0.0).to(tl.float64), 0)
    return num, mass


@triton.jit
def _choose(scores, record, place, peak, V, CH: tl.constexpr):
    """Draw from the kept scores: all whose order lies above `bound`, and the first `quota` of those at it."""
    scale = 1.0 / tl.maximum(real(tl.load(record + TEMPERATURE)), _MIN_TEMPERATURE)
    k = tl.load(record + _TOP_K)
    top_p = real(tl.load(record + _TOP_P))
    bound = tl.full([], 0, tl.uint32)
    quota = V
    if (k > 0) & (k < V):
        bound, quota = _top_k(scores, k, peak, scale, V, CH)
    if top_p < 1.0:
        bound, quota = _top_p(scores, top_p, bound, quota, peak, scale, V, CH)
    least = real(tl.load(record + _MIN_P))
    total = tl.full([], 0.0, tl.float64)
    ties = 0
    for start in range(0, V, CH):
        weight, ties = _weights(scores, start, bound, quota, ties, least, peak, scale, V, CH)
        total += tl.sum(weight, 0)
    return _pick(scores, uniform(record, place) * total, bound, quota, least, peak, scale, V, CH)


@triton.jit
def _top_k(scores, k, peak, scale, V, CH: tl.constexpr):
    bound = tl.full([], 0, tl.uint32)
    for bit in range(0, 32):
        raised = bound | (tl.full([], 0x80000000, tl.uint32) >> bit)
        num, _ = _above(scores, raised, peak, scale, V, CH)
        bound = tl.where(num >= k, raised, bound)
    num, _ = _above(scores, bound + 1, peak, scale, V, CH)
    return bound, k - num


@triton.jit
def _top_p(scores, top_p, bound, quota, peak, scale, V, CH: tl.constexpr):
    """The smallest set of the likeliest that holds `top_p` of the weight which (bound, quota) keep.

    `top_p` and weights have float32's rounding, those of the CPU float64's: where the likeliest hold `top_p` of all to
    within a part in 10 million, such as 1 of 10 logits that are alike and 0.1, one token more or less may be kept.
    """
    _, above = _above(scores, bound + 1, peak, scale, V, CH)
    at = tl.exp((_float(bound) - peak) * scale).to(tl.float64)
    total = above + tl.where(bound > 0, quota * at, 0.0)
    wanted = top_p.to(tl.float64) * total
    best = tl.full([], 0, tl.uint32)
    for bit in range(0, 32):
        raised = best | (tl.full([], 0x80000000, tl.uint32) >> bit)
        _, mass = _above(scores, raised, peak, scale, V, CH)
        best = tl.where(mass >= wanted, raised, best)
    best = tl.maximum(best, bound)
    _, above = _above(scores, best + 1, peak, scale, V, CH)
    at = tl.exp((_float(best) - peak) * scale).to(tl.float64)
    needed = tl.maximum(tl.ceil((wanted - above) / tl.maximum(at, 1e-300)), 1.0)
    needed = tl.minimum(needed, tl.full([], 1.0, tl.float64) * V).to(tl.int32)
    return best, tl.where(best == bound, tl.minimum(quota, needed), needed)


@triton.jit
def _weights(scores, start, bound, quota, ties, least, peak, scale, V, CH: tl.constexpr):
    """Weights of one chunk, 0 for what is not kept; `ties` of earlier chunks lay at the bound."""
    v = start + tl.arange(0, CH)
    x = tl.load(scores + v, mask=v < V, other=-float("inf"))
    order = _order(x)
    weight = tl.exp((x - peak) * scale)
    is_tie = ((order == bound) & (v < V)).to(tl.int32)
    rank = ties + tl.cumsum(is_tie, 0)
    is_kept = (order > bound) | ((is_tie > 0) & (rank <= quota))
    is_kept = is_kept & (weight >= least) & (v < V)
    return tl.where(is_kept, weight, 0.0).to(tl.float64), ties + tl.sum(is_tie, 0)


@triton.jit
def _pick(scores, target, bound, quota, least, peak, scale, V, CH: tl.constexpr):
    token = -1
    last = 0  # of the kept; a target at the very end of the sum belongs to it
    ties = 0
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, V, CH):
        weight, ties = _weights(scores, start, bound, quota, ties, least, peak, scale, V, CH)
        mass = tl.sum(weight, 0)
        j = tl.arange(0, CH)
        if (token < 0) & (before + mass > target):
            at = tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
            token = start + tl.minimum(at, tl.max(tl.where(weight > 0.0, j, 0), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + j, 0), 0))
        before += mass
    return tl.where(token < 0, last, token)


@triton.jit
def _report(line, top, token, wanted, values, ids, V, CH: tl.constexpr):
    """Log probability of the token, then of the `wanted` most likely; of equals the lower id first."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, V, CH):
        v = start + tl.arange(0, CH)
        x = tl.load(line + v, mask=v < V, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top).to(tl.float64), 0)
    norm = top.to(tl.float64) + tl.log(total)
    tl.store(values, (tl.load(line + token).to(tl.float64) - norm).to(tl.float32))
    tl.store(ids, token)
    value = tl.full([], float("inf"), tl.float32)
    id = tl.full([], -1, tl.int32)
    for k in range(0, wanted):
        best = tl.full([], -float("inf"), tl.float32)
        at = tl.full([], _NEVER, tl.int32)
        for start in range(0, V, CH):
            v = start + tl.arange(0, CH)
            x = tl.load(line + v, mask=v < V, other=-float("inf")).to(tl.float32)
            is_left = ((x < value) | ((x == value) & (v > id))) & (v < V)
            x = tl.where(is_left, x, -float("inf"))
            here = tl.max(x, 0)
            if (here > best) | (at == _NEVER):  # the latter: so far there are none but -inf
                at = tl.min(tl.where(is_left & (x == here), v, _NEVER), 0)
                best = here
        tl.store(values + 1 + k, (best.to(tl.float64) - norm).to(tl.float32))
        tl.store(ids + 1 + k, at)
        value = best
        id = at


@triton.jit(do_not_specialize=["row", "num_prompt", "num_tokens"])
def count_tokens(tokens, counts, row, num_prompt, num_tokens, V, BLOCK: tl.constexpr):
    """Begin a row's counts anew: every token is seen, those of the output are counted. One program."""
    line = counts + row.to(tl.int64) * V
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        tl.store(line + v, tl.zeros([BLOCK], tl.int32), mask=v < V)
    tl.debug_barrier()
    for start in range(0, num_tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        here = t < num_tokens
        ids = tl.load(tokens + t, mask=here, other=0)
        tl.atomic_or(line + ids, tl.full([BLOCK], _SEEN, tl.int32), mask=here)
        tl.atomic_add(line + ids, tl.full([BLOCK], 1, tl.int32), mask=here & (t >= num_prompt))
