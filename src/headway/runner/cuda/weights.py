"""A checkpoint's tensors on the device, in the format that is computed with; or made-up ones of the same shapes.

    source ── name by name ──▶ device ──▶ its rows of a fused parameter

A tensor travels in the format it is stored in and is converted on the device. Nothing is held twice but the few tensors
on their way: pinned memory takes the next one while the last one is copied. As e4m3, the matrices of layers have a
factor per row beside them; tables, vectors and the layers at either end stay bfloat16: of 2.3 % that SmolLM2's
perplexity rises by, the last of its 30 layers alone makes 0.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.modelfile.safetensors import RawTensor
from headway.models.cuda import SCALE
from headway.models.params import ModelWeights, Parameter
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.runner.dummy import SPREAD
from headway.runner.placing import place_tensors

FP8 = torch.float8_e4m3fn
_PLAIN_ENDS = 2  # layers at either end that are not e4m3, in models of 16 and more
_TRIALS = 8
LAYOUT = "rows"  # matrices as checkpoints have them: [out, in]

Progress = Callable[[int, int], None]
Source = Tensor | NDArray[np.float32] | RawTensor
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_weights(
    tensors: Iterable[tuple[str, Source]],
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress = lambda done, total: None,
) -> ModelWeights[Tensor]:
    """Fuse a checkpoint's tensors into the parameters of a spec; refuses what does not make it up.

    `on_progress` is called with the numbers that are read and all that there are.
    """
    wanted = parameters(spec)
    total, done = sum(param.rows * max(1, param.columns) for param in wanted), 0
    fused: dict[str, Tensor] = {}
    for param in wanted:
        _add(fused, param, spec, dtype, device)
    for param, _, start, tensor, _ in place_tensors(tensors, spec):
        host = _on_host(tensor, is_pinned=device.type == "cuda")
        _put(fused, param.name, start, host)
        done += host.numel()
        on_progress(done, total)
    return ModelWeights(fused, LAYOUT)


def _on_host(tensor: Source, *, is_pinned: bool) -> Tensor:
    """The tensor in memory of its own, from which a device may read while this process goes on."""
    if isinstance(tensor, Tensor):
        return tensor
    raw = np.frombuffer(tensor.data if isinstance(tensor, RawTensor) else np.ascontiguousarray(tensor), np.uint8)
    host = torch.empty(len(raw), dtype=torch.uint8, pin_memory=is_pinned)
    host.numpy()[:] = raw
    kind = _TYPES[tensor.type] if isinstance(tensor, RawTensor) else torch.float32
    return host.view(kind).view(tensor.shape)


def dummy_weights(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights[Tensor]:
    """Normally distributed matrices, norms of one, no biases; equal seeds give equal weights on equal devices."""
    random = torch.Generator(device=device)
    random.manual_seed(seed)
    fused: dict[str, Tensor] = {}
    plain = torch.bfloat16 if dtype == FP8 else dtype
    for param in parameters(spec):
        _add(fused, param, spec, dtype, device)
        if param.is_matrix:
            made = torch.empty((param.rows, param.columns), dtype=plain, device=device)
            _put(fused, param.name, 0, made.normal_(0.0, SPREAD, generator=random))
        else:
            fused[param.name].fill_(0.0 if param.name.endswith("bias") else 1.0)
    return ModelWeights(fused, LAYOUT)


def _is_inner(param: Parameter, spec: ModelSpec) -> bool:
    """Whether it is a matrix of a layer that is not at either end."""
    if not param.is_matrix or param.is_table:
        return False
    ends, layer = min(_PLAIN_ENDS, spec.layers // 8), int(param.name.split(".")[1])
    return ends <= layer < spec.layers - ends


def _add(fused: dict[str, Tensor], param: Parameter, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    shape = (param.rows, param.columns) if param.is_matrix else (param.rows,)
    is_quantized = dtype == FP8 and _is_inner(param, spec)
    kind = torch.bfloat16 if dtype == FP8 and not is_quantized else dtype
    fused[param.name] = torch.empty(shape, dtype=kind, device=device)
    if is_quantized:
        fused[param.name + SCALE] = torch.empty(param.rows, dtype=torch.float32, device=device)


def _scales(values: Tensor) -> Tensor:
    """The factor of each row, [rows, 1], that rounds it best: of some within the octave above the least possible."""
    least = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / torch.finfo(FP8).max
    best, error = least, torch.full_like(least, float("inf"))
    for step in range(_TRIALS):
        scale = least * 2 ** (step / _TRIALS)
        off = ((values / scale).to(FP8).float() * scale - values).square_().sum(1, keepdim=True)
        best, error = torch.where(off < error, scale, best), torch.minimum(off, error)
    return best


def _put(fused: dict[str, Tensor], name: str, start: int, values: Tensor) -> None:
    """Rows of a parameter, from `start` on."""
    rows = slice(start, start + len(values))
    if name + SCALE in fused:
        values = values.to(fused[name].device, non_blocking=True).float()
        scale = _scales(values)
        fused[name + SCALE][rows] = scale.squeeze(1)
        values = values / scale
    fused[name][rows].copy_(values.to(fused[name].device, non_blocking=True))
