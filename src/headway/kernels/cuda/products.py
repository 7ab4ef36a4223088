"""Matrix products x [rows, K] times w [N, K], transposed, with bits that depend on no other row.

cuBLASLt adds up K in one order whatever the number of rows, once its reductions in split pieces and in reduced
precision are off. With few rows it then leaves most of the chip idle; `few` takes those over with the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def fix_order() -> None:
    """Make every product of this process batch-invariant: settings of the libraries, made once, at the start."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False


def product(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out [rows, N] = x [rows, K] times w [N, K] transposed, by the library.

    Of e4m3 the numbers are multiplied as they are: their factors are for a later kernel, which costs nothing, whereas
    the library's products with a factor per row are slower below 512 rows. Only with fast accumulation, in the tensor
    cores' own 14 bits, it adds up in the order of `few`.
    """
    if x.dtype != torch.float8_e4m3fn:
        torch.mm(x, w.t(), out=out)
    elif x.is_cuda:
        one = _one(x.device)
        torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=out.dtype, use_fast_accum=True, out=out)
    else:
        out.copy_(x.float() @ w.float().t())


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
