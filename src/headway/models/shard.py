"""How one model is spread over several processes: each computes some columns of every product, and all gather them.

    x ─▶ qkv of own heads ─▶ attention of own heads ─┐ gather ─▶ own columns of o ─┐ gather ─▶ x
    x ─▶ own columns of gate and up ─────────────────┘ gather ─▶ own columns of down ┘ gather ─▶ x

No sum is split: a column is added up by one process in the order that one process alone would take. So the bits are
those of the whole model, whatever the number of processes. Splitting sums would save a gather and change the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.kernels.checks import Array
from headway.models.params import Parameter
from headway.models.spec import ModelSpec


class Shard(NamedTuple):
    """One of `size` parts of a model."""

    rank: int = 0
    size: int = 1

    def share(self, total: int) -> range:
        """Which of `total` things it has: neighbours, and one more in the first parts where they do not divide."""
        each, more = divmod(total, self.size)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    def shares(self, total: int) -> tuple[int, ...]:
        """How many each part has, by rank."""
        return tuple(len(Shard(rank, self.size).share(total)) for rank in range(self.size))


WHOLE = Shard()


class Gather(Protocol):
    """Puts together what the parts computed."""

    def __call__(self, x: Array, widths: Sequence[int]) -> Array:
        """[T, widths[rank]] of each rank -> [T, sum of widths], in the order of ranks, the same everywhere."""


def keep_whole(x: Array, widths: Sequence[int]) -> Array:
    """The gather of a model that is not spread."""
    return x


class ShardSizes:
    """What a part computes with, and how wide the pieces are that are gathered."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        group = spec.heads // spec.kv_heads
        self.kv_heads = len(shard.share(spec.kv_heads))
        self.heads = self.kv_heads * group
        self.inner = len(shard.share(spec.intermediate))
        self.hidden = len(shard.share(spec.hidden))
        self.vocab = len(shard.share(spec.vocab_size))
        self.mixed_widths = tuple(each * group * spec.head_dim for each in shard.shares(spec.kv_heads))
        self.inner_widths = shard.shares(spec.intermediate)
        self.hidden_widths = shard.shares(spec.hidden)
        self.vocab_widths = shard.shares(spec.vocab_size)


def check_split(spec: ModelSpec, size: int) -> None:
    """ConfigError if the model cannot be spread over so many processes."""
    if size > 1 and (spec.qk_norm_is_wide or spec.experts):
        reason = "experts" if spec.experts else "one norm over all heads"
        raise ConfigError(f"tensor_parallel is {size}; a model with {reason} runs in one process: set it to 1")
    if size > spec.kv_heads:
        raise ConfigError(
            f"tensor_parallel is {size}; this model has {spec.kv_heads} key heads, so allowed: 1 to {spec.kv_heads}"
        )


def rows_of(param: Parameter, spec: ModelSpec, shard: Shard) -> NDArray[np.int64] | None:
    """Rows of the whole parameter that this part keeps, in order; None: all of them."""
    kind = param.name.rsplit(".", 1)[-1]
    if shard.size == 1 or kind not in ("qkv", "qkv_bias", "o", "gate_up", "down", "head"):
        return None
    if kind in ("qkv", "qkv_bias"):
        units = [spec.heads // spec.kv_heads * spec.head_dim, spec.head_dim, spec.head_dim]
        starts = [0, spec.q_size, spec.q_size + spec.kv_size]
        heads = shard.share(spec.kv_heads)
        spans = [
            (start + unit * heads.start, start + unit * heads.stop) for start, unit in zip(starts, units, strict=True)
        ]
    elif kind == "gate_up":
        inner = shard.share(spec.intermediate)
        spans = [(start + inner.start, start + inner.stop) for start in (0, spec.intermediate)]
    else:
        own = shard.share(param.rows)
        spans = [(own.start, own.stop)]
    return np.concatenate([np.arange(*span) for span in spans])
