"""Adapters of random numbers as PEFT saves them, for any model; written by hand, so that no test needs peft for one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from headway.models.adapter import MODULES, module_shapes
from headway.models.spec import ModelSpec

Tensors = dict[str, np.ndarray]


def adapter_tensors(
    spec: ModelSpec,
    seed: int = 0,
    *,
    rank: int = 4,
    modules: Collection[str] = MODULES,
    ranks: Mapping[str, int] | None = None,
    size: float = 1.0,
) -> Tensors:
    """lora_A and lora_B of these modules in every layer; `ranks` where a module's own is another."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(spec.layers):
        for name, shape in module_shapes(spec).items():
            if name not in modules:
                continue
            own = (ranks or {}).get(name, rank)
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}."
            a = rng.standard_normal((own, shape.num_in), np.float32) * np.float32(size / np.sqrt(shape.num_in))
            b = rng.standard_normal((shape.num_out, own), np.float32) * np.float32(size / np.sqrt(own))
            tensors |= {prefix + "lora_A.weight": a, prefix + "lora_B.weight": b}
    return tensors


def write_adapter(folder: Path, tensors: Tensors, **config: object) -> Path:
    """A directory with these tensors; `config` beside rank 4, alpha 4."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(words))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_adapter_files(folder: Path, spec: ModelSpec, seed: int = 0, *, rank: int = 4, size: float = 1.0) -> Path:
    """All of it at once."""
    return write_adapter(folder, adapter_tensors(spec, seed, rank=rank, size=size), r=rank, lora_alpha=rank)
