"""The greedy choice: what `pick` of every decoder means, in one place, for those that have logits to choose from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOT_FINITE = -1
NONE_ALLOWED = -2


class Allowed(NamedTuple):
    """Which tokens some lines of logits may have. Bits are a byte for eight tokens, lowest first; a set one allows."""

    bits: NDArray[np.uint8]  # [masks, ceil(vocab / 8)]
    line_of: NDArray[np.int32]  # [S] which of them holds for a line of logits, -1: every token is allowed


def best_tokens(logits: NDArray[np.float32], allowed: Allowed | None = None) -> NDArray[np.int64]:
    """For each line of [S, vocab] the lowest id of its largest logit, among the allowed.

    NOT_FINITE where a NaN is or the largest of all is infinite; NONE_ALLOWED where no allowed one is above minus
    infinity.
    """
    best: NDArray[np.int64] = logits.argmax(axis=1)  # of equals the first; a NaN wins over everything
    best[~np.isfinite(logits[np.arange(len(best)), best])] = NOT_FINITE
    if allowed is not None:
        for i in np.flatnonzero((allowed.line_of >= 0) & (best >= 0)):
            kept = np.where(unpacked(allowed.bits[allowed.line_of[i]], logits.shape[1]), logits[i], -np.inf)
            token = int(kept.argmax())
            best[i] = token if kept[token] > -np.inf else NONE_ALLOWED
    return best


def unpacked(bits: NDArray[np.uint8], vocab_size: int) -> NDArray[np.bool_]:
    """One line of bits as one bool per token."""
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
