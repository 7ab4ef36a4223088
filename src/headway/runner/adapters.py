"""The adapters that an executor's rows may have, by name: read, made to fit the model, and kept within their bound.

Reading is done on any thread, beside the steps. A row keeps the adapter it joined with, so that one may be dropped
while a plan in flight still names its row. Which requests have which adapter is the engine's business.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.engine.executor import ReadAdapter
from headway.errors import ConfigError, ModelFormatError, RowFailed
from headway.kernels.low_rank import LowRank, pack_low_rank
from headway.kernels.ops import KernelSet
from headway.modelfile.peft import PeftAdapter, StoredLora, read_adapter
from headway.models.adapter import Adapter, ModuleShape, module_shapes
from headway.models.spec import ModelSpec

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some families have as one, and what it is made of."""

NUMBERS_BESIDE = {"float32": "float32", "bfloat16": "fp16"}
"""How adapters are kept beside weights of a number format: as exactly. Beside any other, as signed bytes."""


class AdapterStore:
    """`most_bytes` bounds all adapters together, as they lie in memory."""

    def __init__(self, spec: ModelSpec, kernels: KernelSet, dtype: str, most_bytes: int) -> None:
        self._spec = spec
        self._kernels = kernels
        self._numbers = NUMBERS_BESIDE.get(dtype, "int8")
        self._most_bytes = most_bytes
        self._adapters: dict[str, Adapter] = {}

    @property
    def num_bytes(self) -> int:
        """Of all adapters."""
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def read(self, path: str) -> ReadAdapter:
        """An adapter ready to be put; ConfigError if the files or the model are not for that. Changes nothing."""
        if self._kernels.adapt is None:
            raise ConfigError(f"the kernels {self._kernels.name!r} run no adapters; take kernels auto")
        room = self._most_bytes - self.num_bytes
        stored = read_adapter(Path(path).expanduser(), 4 * room + 4096)  # numbers are at most quartered
        adapter = fit_adapter(stored, self._spec, self._numbers)
        self._require_room(adapter.num_bytes)
        return ReadAdapter(stored.digest, adapter.num_bytes, adapter)

    def put(self, name: str, read: ReadAdapter) -> None:
        """Rows that join from now on may name it."""
        adapter = read.content
        assert isinstance(adapter, Adapter)
        self._require_room(adapter.num_bytes)
        self._adapters[name] = adapter

    def drop(self, name: str) -> None:
        """No row may name it any more."""
        self._adapters.pop(name, None)

    def of(self, name: str) -> Adapter:
        """RowFailed if there is none of that name."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RowFailed(f"adapter {name!r} is not loaded here")
        return adapter

    def _require_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._most_bytes:
            raise ConfigError(
                f"this adapter takes {num_bytes} bytes, and the others {self.num_bytes} of the {self._most_bytes} that "
                "adapters may take; unload one, or start with more adapter_memory_gb"
            )


def fit_adapter(stored: PeftAdapter, spec: ModelSpec, numbers: str) -> Adapter:
    """An adapter's matrices as this model's decoders take them; ModelFormatError if they are not of its shapes."""
    shapes = module_shapes(spec)
    layers: list[dict[str, LowRank]] = [{} for _ in range(spec.layers)]
    for (layer, name), lora in stored.modules.items():
        if layer >= spec.layers:
            raise ModelFormatError(f"the adapter changes layer {layer}; the model has layers 0 to {spec.layers - 1}")
        names = _FUSED.get(name, (name,))
        if not all(each in shapes for each in names):
            raise ModelFormatError(f"the adapter changes {name}, which this model has for each expert; not run yet")
        _require_fit(layer, name, lora, [shapes[each] for each in names])
        start = 0
        for each in names:
            if each in layers[layer]:
                raise ModelFormatError(f"the adapter changes {each} of layer {layer} twice")
            end = start + shapes[each].num_out
            packed = layers[layer][each] = pack_low_rank(lora.a, lora.b[start:end], lora.scale, numbers)
            if not np.isfinite(packed.scales).all():
                raise ModelFormatError(f"the adapter's {name} of layer {layer} is too large for float32 numbers")
            start = end
    return Adapter(layers)


def _require_fit(layer: int, name: str, lora: StoredLora, shapes: list[ModuleShape]) -> None:
    num_in, num_out = shapes[0].num_in, sum(shape.num_out for shape in shapes)
    if lora.a.shape[1] != num_in or len(lora.b) != num_out:
        raise ModelFormatError(
            f"the adapter's {name} of layer {layer} goes from {lora.a.shape[1]} to {len(lora.b)} numbers; this model's "
            f"goes from {num_in} to {num_out}: it was made for another model"
        )
