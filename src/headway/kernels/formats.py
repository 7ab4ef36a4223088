"""What `auto` means for the number formats of weights and KV cells. Two pure functions of names; imports no torch.

The formats themselves are the kernels' business; this file only chooses between them.
"""

from __future__ import annotations

QUANTIZED = ("int8", "q4")


def resolve_dtype(wanted: str, level: str) -> str:
    """The weights' format: as asked for, or for `auto` the fastest whose quality bar holds.

    `level` is the native kernels' instruction level, "none" where plain torch computes. From avx2 on that is int8:
    a quarter of float32's bytes and integer products, with a perplexity within 1 %. q4 reads half of that, but its
    bar is 3 % and with many rows, where products decide and not memory, it has nothing to gain. Plain torch and the
    level for any machine have no fast integer products, so there float32 stays.
    """
    if wanted != "auto":
        return wanted
    return "float32" if level in ("none", "generic") else "int8"


def resolve_kv_dtype(wanted: str, dtype: str) -> str:
    """The KV cells' format: as asked for, or for `auto` the one that fits the weights.

    Quantized weights change an answer more than fp16 cells do, and halving what attention reads makes a step
    faster, so fp16 comes with them. float32 and bfloat16 are asked for by people who want to keep float32's numbers.
    """
    if wanted != "auto":
        return wanted
    return "fp16" if dtype in QUANTIZED else "float32"
