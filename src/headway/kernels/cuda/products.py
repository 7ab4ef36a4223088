"""Matrix products x [rows, K] times w [N, K], transposed, with bits that depend on no other row.

cuBLASLt adds up K in one order whatever the number of rows, once its reductions in split pieces and in reduced
precision are off. With few rows it then leaves most of the chip idle; `few` takes those over with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fix_order() -> None:
    """Make every product of this process batch-invariant: settings of the libraries, made once, at the start."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False


def product(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out [rows, N] = x [rows, K] times w [N, K] transposed, by the library."""
    torch.mm(x, w.t(), out=out)
