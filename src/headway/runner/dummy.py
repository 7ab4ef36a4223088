"""Made-up tensors of a model's sizes, for measuring speed where no checkpoint is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.models.registry import parameters
from headway.models.spec import ModelSpec

SPREAD = 0.02
"""Standard deviation of made-up matrices: activations stay numbers through every layer."""


@dataclass(frozen=True, slots=True)
class DummyTensors:
    """Normally distributed matrices, norms of one, no biases; equal specs give equal tensors."""

    digest: str
    spec: ModelSpec

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(checkpoint name, float32 array), one at a time."""
        random = np.random.default_rng(0)
        for param in parameters(self.spec):
            for part in param.parts:
                shape = param.part_shape(part)
                if param.is_matrix:
                    yield part.source, random.standard_normal(shape, dtype=np.float32) * np.float32(SPREAD)
                else:
                    yield part.source, np.full(shape, 0.0 if param.name.endswith("bias") else 1.0, np.float32)

    def grouped(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """As `tensors`: nothing is stored in groups."""
        return self.tensors()
