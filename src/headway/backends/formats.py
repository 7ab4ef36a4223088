"""What `auto` means for the number formats of weights and KV cells. Two pure functions of names; imports no torch.

The formats themselves are the kernels' business; this file only chooses between them.
"""

from __future__ import annotations

QUANTIZED = ("int8", "q4")


def resolve_dtype(wanted: str, level: str) -> str:
    """The weights' format: as asked for, or for `auto` the fastest whose quality bar holds.

    `level` is the native kernels' instruction level, "none" where plain torch computes. float32 until the native
    kernels multiply other formats.
    """
    return "float32" if wanted == "auto" else wanted


def resolve_kv_dtype(wanted: str, dtype: str) -> str:
    """The KV cells' format: as asked for, or for `auto` the one that fits the weights.

    Quantized weights change an answer more than fp16 cells do, and halving what attention reads makes a step
    faster, so fp16 comes with them. float32 and bfloat16 are asked for by people who want to keep float32's numbers.
    """
    if wanted != "auto":
        return wanted
    return "fp16" if dtype in QUANTIZED else "float32"
