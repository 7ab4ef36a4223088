"""Logits become tokens. Every choice is a pure function of (logits, request, tokens so far).

    mask -> bias -> penalties -> DRY -> min_tokens -> temperature -> top-k -> top-p -> min-p -> XTC -> draw

The draw is that of (seed, position), and whether XTC applies that of (~seed, position).

No state is kept between steps, so a request goes on exactly wherever it resumes; each row is computed on its own,
so other rows cannot change a bit of it. Log probabilities are the model's own: taken before all of the above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.errors import RowFailed
from headway.models.pick import NONE_ALLOWED, NOT_FINITE, best_tokens, unpacked
from headway.runner.dry import repeats
from headway.runner.rng import uniform
from headway.runner.slots import RowRequest, Slots, has_penalties
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Mask = NDArray[np.uint8]  # [positions, ceil(vocab / 8)]: bits of the tokens that may be chosen, lowest first
Masks = Mapping[int, Mask]  # by row; a row without one may choose any token

NO_MASKS: Masks = {}
MIN_TEMPERATURE = 1e-5  # below, scaled logits would leave float32; the draw is greedy there in all but name
_WHY_NOT = {NOT_FINITE: "logits are not finite", NONE_ALLOWED: "no token is left to choose: every one is masked"}
_GROUP = 32  # values of which one is ordered in the search for the largest
_SPAN = 256  # weights summed at a time: finding the span first is three times faster than one long running sum


@dataclass(slots=True)
class Sampled:
    """Parallel to the rows that were asked for; a failed row holds token 0."""

    tokens: Ints  # [N]
    failed: dict[int, str] = field(default_factory=dict)  # row -> reason
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # row -> entry


def sample(logits: Floats, index: Ints, rows: Ints, positions: Ints, slots: Slots, masks: Masks = NO_MASKS) -> Sampled:
    """Sample the token at positions[i] of rows[i] from logits[index[i]]; several rows may read one line of logits."""
    out = picked(best_tokens(logits), index, rows)
    # Plain greedy rows are done: only the others are looked at one by one.
    is_done = slots.is_plain[rows] & ~slots.needs_mask[rows] & (positions >= slots.stops_from[rows])
    if masks:
        is_done &= ~np.isin(rows, list(masks))
    # One line for all of them: a new one of its size for each would be given back to the system every time.
    scratch = np.empty(logits.shape[1] if not is_done.all() else 0, np.float32)
    masked = np.empty(logits.shape[1] if masks else 0, np.float32)
    for i in np.flatnonzero(~is_done):
        if int(rows[i]) in out.failed:
            continue
        row, line = int(rows[i]), logits[index[i]]
        try:
            request = slots.request(row)
            allowed = _masked(line, masks.get(row), request, masked)
            token = choose(allowed, request, slots.tokens[row, : positions[i]], scratch)
            if request.params.logprobs is not None:
                out.logprobs[row] = logprob(line, token, request.params.logprobs)
            out.tokens[i] = token
        except Exception as error:  # an error in one row must not affect the others
            out.failed[row] = str(error) if isinstance(error, RowFailed) else f"sampling failed: {error!r}"
    return out


def _masked(line: Floats, mask: Mask | None, request: RowRequest, into: Floats) -> Floats:
    """The logits of the tokens that may be chosen; the others cannot be."""
    if mask is None:
        if request.params.grammar:  # any token would do as well as another
            raise RowFailed("the mask of a row with a grammar is missing")
        return line
    into.fill(-np.inf)
    np.copyto(into, line, where=unpacked(mask[0], len(line)))
    return into


def picked(best: Ints, index: Ints, rows: Ints) -> Sampled:
    """The greedy choice of rows[i] is best[index[i]], as a model's `pick` gives it."""
    tokens = best[index]
    is_sick = tokens < 0
    if not is_sick.any():
        return Sampled(tokens)
    failed = {int(rows[i]): _WHY_NOT[int(tokens[i])] for i in np.flatnonzero(is_sick)}
    return Sampled(np.where(is_sick, 0, tokens), failed)


def choose(logits: Floats, request: RowRequest, tokens: NDArray[np.int32], scratch: Floats | None = None) -> int:
    """The token that follows `tokens`, prompt and output so far, in this request.

    A `scratch` like the logits is computed in, if given, here and below.
    """
    params = request.params
    scores = adjust(logits, request, tokens, scratch)
    best = int(scores.argmax())
    if scores[best] == -np.inf:
        raise RowFailed(_WHY_NOT[NONE_ALLOWED])
    if params.is_greedy:
        return best
    ids, weights = filtered(scores, params, scratch)
    if params.xtc_probability and uniform(~request.seed, len(tokens)) < params.xtc_probability:
        weights = without_top(weights, params.xtc_threshold)
    at = draw(weights, uniform(request.seed, len(tokens)))
    return at if ids is None else int(ids[at])


def adjust(logits: Floats, request: RowRequest, tokens: NDArray[np.int32], scratch: Floats | None = None) -> Floats:
    """Logits after bias, penalties and min_tokens; the input is not written to."""
    params, output = request.params, tokens[request.num_prompt :]
    too_short = len(output) < params.min_tokens
    if not (params.logit_bias or has_penalties(params) or too_short):
        return logits
    scores = np.positive(logits, out=scratch)  # a copy
    if params.logit_bias:
        bias = params.logit_bias
        scores[np.fromiter(bias.keys(), np.int64, len(bias))] += np.fromiter(bias.values(), np.float32, len(bias))
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        seen = scores[tokens]  # a token that occurs twice is read and written twice, with one value
        scores[tokens] = np.where(seen > 0, seen / penalty, seen * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(output, return_counts=True)
        scores[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.dry_multiplier:
        found = repeats(tokens, params, request.is_breaker)
        scores[found.ids] -= found.amounts
    if too_short:
        scores[[token for token in request.stop_ids if 0 <= token < len(scores)]] = -np.inf
    return scores


def filtered(scores: Floats, params: SamplingParams, scratch: Floats | None = None) -> tuple[Ints | None, Floats]:
    """Ids that may be drawn, ascending (None: all of them), and their weights, of which the largest is 1."""
    with np.errstate(over="ignore"):  # with a tiny temperature an unlikely token becomes -inf, which is right
        weights = np.subtract(scores, scores.max(), out=scratch)
        weights /= np.float32(max(params.temperature, MIN_TEMPERATURE))
    ids: Ints | None = None
    if 0 < params.top_k < len(weights):
        ids = np.sort(largest(weights, params.top_k))
        weights = weights[ids]
    np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = _narrow(ids, kept), weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))  # the most likely weighs 1
        ids, weights = _narrow(ids, kept), weights[kept]
    return ids, weights


def without_top(weights: Floats, threshold: float) -> Floats:
    """XTC: of the weights whose share is the threshold or more only the smallest stays; of equal ones the last."""
    top = np.flatnonzero(weights >= threshold * float(weights.sum(dtype=np.float64)))
    if len(top) > 1:
        stays = top[len(top) - 1 - int(weights[top][::-1].argmin())]
        weights[top[top != stays]] = 0.0
    return weights


def largest(values: Floats, count: int) -> Ints:
    """Indices of the `count` largest values, largest first, lower indices first on ties."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    near = np.flatnonzero(values >= _below_largest(values, count))
    return near[np.argsort(-values[near], kind="stable")[:count]]


def _below_largest(values: Floats, count: int) -> np.float32:
    """A bound that the `count` largest values reach and few others do.

    The values fall into groups; a bound reached by the largest of `count` groups is reached by `count` values. That
    orders one value of each group instead of all.
    """
    width = len(values) // _GROUP
    bests = values[: width * _GROUP].reshape(_GROUP, width).max(axis=0) if width >= count else values
    bound: np.float32 = np.partition(bests, len(bests) - count)[len(bests) - count]
    return bound


def logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """The token's log probability under the model's own distribution, and the `top` most likely."""
    peak = logits.max()
    with np.errstate(over="ignore"):
        norm = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    ids = largest(logits, top) if top else ()
    return TokenLogprob(float(logits[token]) - norm, tuple((int(i), float(logits[i]) - norm) for i in ids))


def draw(weights: Floats, u: float) -> int:
    """Inverse of the cumulated weights at u in [0, 1); a weight of zero is never drawn."""
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SPAN), dtype=np.float64))
    target = min(u * float(sums[-1]), math.nextafter(float(sums[-1]), 0.0))
    span = int(np.searchsorted(sums, target, side="right"))
    rest = target - (float(sums[span - 1]) if span else 0.0)
    first = span * _SPAN
    inner = np.cumsum(weights[first : first + _SPAN], dtype=np.float64)
    # The two sums round differently: a target at the very end of the span belongs to its last real weight.
    at = min(int(np.searchsorted(inner, rest, side="right")), int(np.searchsorted(inner, inner[-1])))
    return first + at


def _narrow(ids: Ints | None, kept: Ints) -> Ints:
    return kept if ids is None else ids[kept]


def _nucleus(weights: Floats, top_p: float) -> Ints:
    """Indices, ascending, of the smallest set of the likeliest weights that holds `top_p` of the mass."""
    total = float(weights.sum(dtype=np.float64))
    # All weights below (1 - p) * total / n together miss less than 1 - p: they are outside, and need no sorting.
    # Half of that bound leaves room for rounding.
    near = np.flatnonzero(weights > (1.0 - top_p) * total / (2 * len(weights)))
    values = weights[near]
    ranked = np.sort(values)[::-1]  # values, not indices: ten times faster over a flat distribution
    mass = np.cumsum(ranked, dtype=np.float64)
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(near))
    is_kept = values > ranked[count - 1]
    tied = np.flatnonzero(values == ranked[count - 1])
    is_kept[tied[: count - np.count_nonzero(is_kept)]] = True
    kept: Ints = near[is_kept]
    return kept
