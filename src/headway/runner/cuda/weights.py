"""A checkpoint's tensors on the device, in the format that is computed with; or made-up ones of the same shapes.

    source ── name by name ──▶ device ──▶ its rows of a fused parameter

A tensor travels in the format it is stored in and is converted on the device. Nothing is held twice but the one tensor
on its way. As e4m3, the matrices of layers have a factor per row beside them; tables and vectors stay bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.cuda import SCALE
from headway.models.params import ModelWeights, Parameter
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.runner.placing import place_tensors

FP8 = torch.float8_e4m3fn
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
    fused: dict[str, Tensor] = {}
    for param in wanted:
        _add(fused, param, dtype, device)
    for done, (param, _, start, tensor, _) in enumerate(place_tensors(tensors, spec), 1):
        values = tensor if isinstance(tensor, Tensor) else torch.from_numpy(np.array(tensor))
        _put(fused, param.name, start, values)
        on_progress(done, num_parts)
    return ModelWeights(fused, LAYOUT)


def dummy_weights(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Normally distributed matrices, norms of one, no biases; equal seeds give equal weights on equal devices."""
    random = torch.Generator(device=device)
    random.manual_seed(seed)
    fused: dict[str, Tensor] = {}
    plain = torch.bfloat16 if dtype == FP8 else dtype
    for param in parameters(spec):
        _add(fused, param, dtype, device)
        if param.is_matrix:
            made = torch.empty((param.rows, param.columns), dtype=plain, device=device)
            _put(fused, param.name, 0, made.normal_(0.0, _SPREAD, generator=random))
        else:
            fused[param.name].fill_(0.0 if param.name.endswith("bias") else 1.0)
    return ModelWeights(fused, LAYOUT)


def _add(fused: dict[str, Tensor], param: Parameter, dtype: torch.dtype, device: torch.device) -> None:
    shape = (param.rows, param.columns) if param.is_matrix else (param.rows,)
    is_quantized = dtype == FP8 and param.is_matrix and not param.is_table
    kind = torch.bfloat16 if dtype == FP8 and not is_quantized else dtype
    fused[param.name] = torch.empty(shape, dtype=kind, device=device)
    if is_quantized:
        fused[param.name + SCALE] = torch.empty(param.rows, dtype=torch.float32, device=device)


def _put(fused: dict[str, Tensor], name: str, start: int, values: Tensor) -> None:
    """Rows of a parameter, from `start` on."""
    rows = slice(start, start + len(values))
    if name + SCALE in fused:
        values = values.to(fused[name].device, torch.float32)
        scale = values.abs().amax(1).clamp_min(1e-30) / torch.finfo(FP8).max
        fused[name + SCALE][rows] = scale
        values = values / scale.unsqueeze(1)
    fused[name][rows].copy_(values.to(fused[name].device))
