"""Models with made-up weights that the tests on a CUDA device share: well-known shapes, odd ones, number formats.

Import it behind `cuda_kit`, which says how Triton is to run.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import torch

from cuda_kit import DEVICE, CudaDesk
from headway.kernels.cuda.products import fix_order
from headway.models.params import ModelWeights
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec
from headway.runner.cuda.weights import dummy_weights

KNOWN = ("llama-3.1-8b", "llama-3.2-1b", "smollm2-135m")
_PLAIN = shape_of("smollm2-135m")
ODD = {
    # Heads that fill no power of two, one to a key head, with norms of their own.
    "heads-96": replace(_PLAIN, hidden=3072, intermediate=8192, heads=32, kv_heads=32, head_dim=96, qk_norm=True),
    # Positions rotate within the product of qkv, for two tiles of a half.
    "heads-256": replace(_PLAIN, hidden=3072, intermediate=8192, heads=16, kv_heads=2, head_dim=256),
    # Prefill items of 9 tokens, which straddle tiles; biases.
    "groups-7": replace(_PLAIN, hidden=3584, intermediate=9472, heads=28, kv_heads=4, head_dim=128, qkv_bias=True),
}
SHAPES = (*KNOWN, *ODD)
PLAIN, HALF, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8
FORMATS = {
    "plain": (PLAIN, PLAIN),
    "cells8": (PLAIN, FP8),
    "both8": (FP8, FP8),
    "int8": (PLAIN, INT8),
    "float32": (torch.float32, torch.float32),
    "half": (HALF, HALF),
    "half8": (HALF, FP8),
}
"""Of weights, of KV cells."""
MOST_ERROR = {"float32": 5e-5, "half": 3e-3, "plain": 3e-2, "int8": 4e-2, "cells8": 0.12, "half8": 0.12, "both8": 0.2}
"""Of logits against plain arithmetic, as a share of their norm."""
CASES = [f"{shape} {kinds}" for shape in KNOWN for kinds in FORMATS if kinds != "half8"]
CASES += [f"{shape} {kinds}" for shape in ODD for kinds in FORMATS if kinds != "both8"]


def made_up(shape: str, dtype: torch.dtype, max_len: int) -> tuple[ModelSpec, ModelWeights[torch.Tensor]]:
    """Two layers of the shape: every kernel and every product that a whole model has."""
    fix_order()
    gc.collect()
    torch.cuda.empty_cache()  # other tests run beside this one, and the last desk is gone
    spec = replace(ODD[shape] if shape in ODD else shape_of(shape), layers=2, max_len=max_len)
    weights = dummy_weights(spec, dtype=dtype, device=DEVICE)
    for name, values in weights.tensors.items():
        if name.endswith(("bias", "q_norm", "k_norm")):
            values.normal_(0.0 if name.endswith("bias") else 1.0, 0.5)
    return spec, weights


def desk_of(
    shape: str, kinds: tuple[torch.dtype, torch.dtype], *, num_rows: int, num_blocks: int, max_tokens: int, max_len: int
) -> CudaDesk:
    """An executor over such a model, with KV cells in the second format."""
    spec, weights = made_up(shape, kinds[0], max_len)
    sizes = {"num_rows": num_rows, "num_blocks": num_blocks, "max_tokens": max_tokens}
    return CudaDesk(spec, weights=weights, kv_dtype=kinds[1], **sizes)


def prompt_of(num: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(40_000) for _ in range(num)]
