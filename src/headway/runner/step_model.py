"""`StepModel`: what the runner needs of a decoder."""

from __future__ import annotations

from typing import Protocol

from headway.kernels.checks import Array
from headway.models.batch import ForwardBatch
from headway.models.pick import Allowed
from headway.runner.sampler import Floats, Ints


class StepModel(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, batch: ForwardBatch, kv: Array) -> Floats:
        """Write the KV of the batch's tokens; return float32 logits [S, vocab] of its sample_index."""

    def pick(self, batch: ForwardBatch, kv: Array, allowed: Allowed | None = None) -> Ints:
        """The same, of which only the greedy choice of each line is kept: [S] as in `best_tokens`."""
