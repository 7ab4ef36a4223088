"""DRY: tokens that would go on with a repeat of what was written before become less likely, the longer the repeat.

A pure function of a row's tokens. Where the last k tokens stood before, the token that followed them there loses
multiplier * base ** (k - allowed_length) of its logit, if k is allowed_length or more; k does not reach over breakers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.values.params import SamplingParams

MOST_REPEATED = 50  # tokens of a repeat that count; more would leave float32


class Penalties(NamedTuple):
    """What to take off the logits of some tokens."""

    ids: NDArray[np.int64]
    amounts: NDArray[np.float32]


def breaker_mask(breakers: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    """[vocab_size]: whether a repeat ends at the token."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[[token for token in breakers if 0 <= token < vocab_size]] = True
    return mask


def repeats(tokens: NDArray[np.int32], params: SamplingParams, is_breaker: NDArray[np.bool_]) -> Penalties:
    """What the token behind `tokens` costs where it would go on with a repeat."""
    seen = tokens[-params.dry_range :] if params.dry_range else tokens
    last = len(seen) - 1
    none = Penalties(np.empty(0, np.int64), np.empty(0, np.float32))
    if last < 1 or is_breaker[seen[last]]:
        return none
    # For each place before the last: whether all tokens up to here are those before the last one, and how many are.
    alive = seen[:last] == seen[last]
    lengths = alive.astype(np.int8)
    for back in range(1, min(MOST_REPEATED, last + 1)):
        wanted = seen[last - back]
        if is_breaker[wanted]:
            break
        alive[:back] = False
        alive[back:] &= seen[: last - back] == wanted
        if not alive.any():
            break
        lengths += alive
    ends = np.flatnonzero(lengths >= min(params.dry_allowed_length, MOST_REPEATED + 1))
    if not len(ends):
        return none
    ids, place = np.unique(seen[ends + 1], return_inverse=True)
    longest = np.zeros(len(ids), np.int64)
    np.maximum.at(longest, place, lengths[ends])
    amounts = params.dry_multiplier * np.power(params.dry_base, longest - params.dry_allowed_length, dtype=np.float64)
    return Penalties(ids.astype(np.int64), np.minimum(amounts, 1e30).astype(np.float32))
