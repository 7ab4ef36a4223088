"""What a step costs, learned from the steps themselves.

    seconds = base + mixed + tokens * b + pairs * a + decode * d + context * e + chunks * s + copies * c + verify * v

`tokens` are those of chunks, `pairs` is twice the key-query pairs of chunks (2 * start * count + count^2), `context`
the tokens whose KV decode rows read; `mixed` is paid once by a step that carries a chunk. Old steps are forgotten
slowly, a weight is never negative, and one step in `_EVERY` pays for solving nine equations (about 0.1 ms).

Everything that predicts in headway predicts with this: chunk sizes, costs of requests, waiting times, shedding.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from headway.values.work import Costs, Work, pairs_of

_FORGET = 0.999
_EVERY = 32  # steps between two fits
_WARM_UP = 8  # steps that teach nothing: caches are cold
_OUTLIER = 8.0  # times the usual error
_MOST_OUTLIERS = 16  # in a row; then they are the new cost
_LEAST = 64  # tokens of a chunk that may always be tried
_NEWS = 16  # steps with a chunk


class CostWeights(NamedTuple):
    """Seconds per unit of each feature, in the order of `Work.features`."""

    base: float = 0.0
    mixed: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    decode: float = 0.0
    context: float = 0.0
    chunks: float = 0.0
    copies: float = 0.0
    verify: float = 0.0


_SIZE = len(CostWeights._fields)
# What each feature usually amounts to, so that none is drowned by another when equations are solved.
_SCALE = (1.0, 1.0, 100.0, 1e5, 10.0, 1e4, 2.0, 10.0, 10.0)


class _Kind:
    """How wrong predictions of one kind of step are."""

    __slots__ = ("count", "error", "outliers")

    def __init__(self) -> None:
        self.count = 0
        self.error = 0.0  # usual, seconds
        self.outliers = 0  # in a row


class CostModel(Costs):
    """Given weights it is fixed and learns nothing; else it learns from `observe`, and knows nothing before that."""

    def __init__(self, weights: CostWeights | None = None) -> None:
        self.weights = weights or CostWeights()
        self.learns = weights is None
        self.is_ready = not self.learns  # or once it has seen enough
        self.num_seen = 0
        self.num_fits = 0
        self.most_tokens = 0  # of chunks in one step that taught something: beyond, it only guesses
        self.margin = 0.0  # what 19 of 20 mixed steps exceed their prediction by at most, seconds
        self.mean_decode = 1.0  # rows that decode together
        self._token_rate = 0.0  # tokens per second of the last step with a chunk
        self._num_mixed = 0  # steps with a chunk that taught something
        self._normal = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        self._over: deque[float] = deque(maxlen=256)
        self._kinds = tuple(_Kind() for _ in range(4))  # without and with a chunk, without and with copies

    def observe(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""
        if work.decode:
            self.mean_decode += 0.02 * (work.decode - self.mean_decode)
        if not self.learns:
            return
        self.num_seen += 1
        if self.num_seen <= _WARM_UP or self._is_outlier(work, seconds):
            return
        self.most_tokens = max(self.most_tokens, work.tokens)
        if work.tokens and seconds > 0:
            self._token_rate = work.tokens / seconds
        row = [x / scale for x, scale in zip(work.features(), _SCALE, strict=True)]
        for i, x in enumerate(row):
            normal = self._normal[i]
            for j in range(i + 1):
                normal[j] = _FORGET * normal[j] + x * row[j]
            self._moment[i] = _FORGET * self._moment[i] + x * seconds
        if self.num_seen % _EVERY == 0 or self._is_news(work):
            self._fit()

    def _is_news(self, work: Work) -> bool:
        """The first steps with a chunk are learned from at once: until then chunks seem to cost nothing."""
        if work.chunks:
            self._num_mixed += 1
        return bool(work.chunks) and self.num_fits > 0 and self._num_mixed <= _NEWS

    def _is_outlier(self, work: Work, seconds: float) -> bool:
        """Steps with a chunk, with copies and without are judged apart: rare kinds must not look odd beside others."""
        kind = self._kinds[bool(work.chunks) + 2 * bool(work.copies)]
        over = seconds - self.step(work) if self.num_fits else 0.0
        if kind.count > _WARM_UP and abs(over) > _OUTLIER * kind.error + 1e-4:
            kind.outliers += 1
            if kind.outliers < _MOST_OUTLIERS:
                return True
        kind.outliers = 0
        if self.num_fits:
            kind.count += 1
            kind.error += max(0.05, 1 / kind.count) * (abs(over) - kind.error)
            if work.chunks:
                self._over.append(over)
        return False

    def _fit(self) -> None:
        """Least squares, held gently to the last answer where the steps say nothing; negative weights become zero."""
        active = list(range(_SIZE))
        last = [w * scale for w, scale in zip(self.weights, _SCALE, strict=True)]
        ridge = 1e-6 * max(self._normal[i][i] for i in range(_SIZE)) + 1e-12
        found = [0.0] * _SIZE
        while True:
            matrix = [[self._normal[max(i, j)][min(i, j)] + (ridge if i == j else 0.0) for j in active] for i in active]
            solved = _solve(matrix, [self._moment[i] + ridge * last[i] for i in active])
            worst = min(range(len(active)), key=solved.__getitem__)
            if solved[worst] >= 0.0 or len(active) == 1:
                for i, value in zip(active, solved, strict=True):
                    found[i] = max(0.0, value)
                break
            del active[worst]
        self.weights = CostWeights(*(value / scale for value, scale in zip(found, _SCALE, strict=True)))
        self.num_fits += 1
        self.is_ready = True
        if self._over:
            ordered = sorted(self._over)
            self.margin = max(0.0, ordered[int(0.95 * (len(ordered) - 1))])

    def step(self, work: Work) -> float:
        """Seconds that a step with this work takes."""
        w = self.weights
        mixed = w.mixed + w.chunks * work.chunks if work.chunks else 0.0
        return (
            w.base
            + mixed
            + w.tokens * work.tokens
            + w.pairs * work.pairs
            + w.decode * work.decode
            + w.context * work.context
            + w.copies * work.copies
            + w.verify * work.verify
        )

    def prefill(self, count: int, start: int = 0) -> float:
        """Seconds that computing `count` prompt tokens adds, `start` being present."""
        return self.weights.tokens * count + self.weights.pairs * pairs_of(start, count) + self.weights.chunks

    def copy(self, num_blocks: int) -> float:
        """Seconds that moving so many blocks adds."""
        return self.weights.copies * num_blocks

    def decode(self, num_prompt: int, num_output: float, num_rows: float | None = None) -> float:
        """Seconds of the engine that so many output tokens take, among so many rows; among as many as usual if None."""
        w = self.weights
        each = w.base / max(1.0, num_rows or self.mean_decode) + w.decode + w.context * (num_prompt + num_output / 2)
        return num_output * each

    def chunk_within(self, seconds: float, work: Work, start: int) -> int:
        """Prompt tokens that a step with this work can carry besides, so that it takes no longer.

        While it learns, at most twice what it has seen. Where tokens seem to be free, which chunks of one size cannot
        disprove, at most what the last mixed step would have had in that time: part of it was not its tokens' doing.
        """
        count = self._chunk_within(seconds, work, start)
        if not self.learns:
            return count
        most = 2 * self.most_tokens if self.weights.tokens > 0 else int(self._token_rate * seconds)
        return min(count, max(_LEAST, most))

    def _chunk_within(self, seconds: float, work: Work, start: int) -> int:
        w = self.weights
        left = seconds - self.step(work._replace(chunks=work.chunks + 1)) - self.margin
        if left <= 0:
            return 0
        linear = w.tokens + 2 * w.pairs * start
        if w.pairs > 0:
            return int((math.sqrt(linear * linear + 4 * w.pairs * left) - linear) / (2 * w.pairs))
        return int(left / linear) if linear > 0 else 1 << 30


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive system by elimination; both arguments are used up."""
    size = len(right)
    for k in range(size):
        pivot = matrix[k][k]
        row_k = matrix[k]
        for i in range(k + 1, size):
            row = matrix[i]
            factor = row[k] / pivot
            if factor:
                for j in range(k + 1, size):
                    row[j] -= factor * row_k[j]
                right[i] -= factor * right[k]
    for k in range(size - 1, -1, -1):
        row_k = matrix[k]
        right[k] = (right[k] - sum(row_k[j] * right[j] for j in range(k + 1, size))) / row_k[k]
    return right
