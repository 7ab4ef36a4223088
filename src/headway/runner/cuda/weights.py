"""A checkpoint's tensors on the device, in the format that is computed with; or made-up ones of the same shapes.

    source ── name by name ──▶ device ──▶ its rows of a fused parameter

A tensor travels in the format it is stored in and is converted on the device. Nothing is held twice but the one tensor
on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.params import ModelWeights, Parameter
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.runner.placing import place_tensors

LAYOUT = "rows"  # matrices as checkpoints have them: [out, in]
_SPREAD = 0.02  # standard deviation of made-up matrices: activations stay numbers through every layer

Progress = Callable[[int, int], None]


def load_weights(
    tensors: Iterable[tuple[str, Tensor | NDArray[np.float32]]],
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress = lambda done, total: None,
) -> ModelWeights:
    """Fuse a checkpoint's tensors into the parameters of a spec; refuses what does not make it up."""
    wanted = parameters(spec)
    num_parts = sum(len(param.parts) for param in wanted)
    fused = {param.name: _empty(param, dtype, device) for param in wanted}
    for done, (param, _, start, tensor, _) in enumerate(place_tensors(tensors, spec), 1):
        values = tensor if isinstance(tensor, Tensor) else torch.from_numpy(np.array(tensor))
        into = fused[param.name]
        into[start : start + len(values)].copy_(values.to(into.device))
        on_progress(done, num_parts)
    return ModelWeights(fused, LAYOUT)


def dummy_weights(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Normally distributed matrices, norms of one, no biases; equal seeds give equal weights on equal devices."""
    random = torch.Generator(device=device)
    random.manual_seed(seed)
    fused = {}
    for param in parameters(spec):
        tensor = _empty(param, dtype, device)
        if param.is_matrix:
            tensor.normal_(0.0, _SPREAD, generator=random)
        else:
            tensor.fill_(0.0 if param.name.endswith("bias") else 1.0)
        fused[param.name] = tensor
    return ModelWeights(fused, LAYOUT)


def _empty(param: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (param.rows, param.columns) if param.is_matrix else (param.rows,)
    return torch.empty(shape, dtype=dtype, device=device)
