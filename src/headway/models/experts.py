"""An MLP, and a choice of several for each token.

Which experts a token has, and in which order what they give is added, follows from that token alone: its bits do not
depend on the other tokens that share an expert with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet
from headway.models.spec import ModelSpec


class Mlp(NamedTuple):
    """Packed matrices."""

    gate_up: Array
    down: Array


class Experts(NamedTuple):
    router: Array
    mlps: tuple[Mlp, ...]

    def mix(self, x: Array, spec: ModelSpec, ops: KernelSet, gate: Callable[[Array], Array]) -> Array:
        """x [T, hidden] -> [T, hidden]: the shares of each token's experts, added in ascending order of experts."""
        chosen, shares = choose(ops.linear(x, self.router, None, spec.experts), spec)
        y = np.zeros((len(x), spec.hidden), np.float32)
        for number, mlp in enumerate(self.mlps):
            rows, places = np.nonzero(chosen == number)
            if not len(rows):
                continue
            inner = gate(ops.linear(x[rows], mlp.gate_up, None, 2 * spec.intermediate))
            y[rows] += ops.linear(inner, mlp.down, None, spec.hidden) * shares[rows, places, None]
        return y


def choose(scores: Array, spec: ModelSpec) -> tuple[Array, Array]:
    """The likeliest experts of each token, [T, experts_per_token], and their shares; of equal ones the first."""
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : spec.experts_per_token]
    kept = np.take_along_axis(shares, chosen, 1)
    if spec.are_experts_normed:
        kept = kept / kept.sum(1, keepdims=True)
    return chosen, kept


def read_mlp(tensors: Mapping[str, Array], prefix: str) -> Mlp | None:
    """The MLP whose parameters begin with the prefix; None where there is none."""
    if prefix + "gate_up" not in tensors:
        return None
    return Mlp(tensors[prefix + "gate_up"], tensors[prefix + "down"])


def read_experts(tensors: Mapping[str, Array], prefix: str) -> Experts | None:
    """The experts of a layer; None where it has none."""
    if prefix + "router" not in tensors:
        return None
    mlps: list[Mlp] = []
    while (mlp := read_mlp(tensors, f"{prefix}experts.{len(mlps)}.")) is not None:
        mlps.append(mlp)
    return Experts(tensors[prefix + "router"], tuple(mlps))
