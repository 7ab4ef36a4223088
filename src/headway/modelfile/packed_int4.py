"""Checkpoints whose matrices AWQ or GPTQ rounded to 4 bits: four tensors of a matrix become its groups.

    AWQ    qweight [in, out / 8]   qzeros [groups, out / 8]    scales [groups, out]     w = scale (q - zero)
    GPTQ   qweight [in / 8, out]   qzeros [groups, out / 8]    scales [groups, out]     and g_idx [in]: an input's group

A word of 32 bits has eight numbers. Steps and zeros are exact in float32, and so is d * q + m with d = scale and
m = -scale * zero: no weight moves. Owns the config's `quantization_config` of these two; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ModelFormatError
from headway.modelfile.safetensors import RawTensor, SafetensorsFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups

GROUP = 32
METHODS = ("awq", "gptq")
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that nibble i of a word belongs to


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """How a checkpoint's matrices were rounded."""

    method: str  # awq or gptq
    group_size: int  # inputs that share a step; -1: all
    zero_offset: int  # added to the zeros as they are stored

    @classmethod
    def read(cls, where: str, settings: object) -> PackedInt4:
        """What a `quantization_config` says; ModelFormatError for what headway does not read."""
        told: Mapping[str, object] = settings if isinstance(settings, dict) else {}
        method, bits = told.get("quant_method"), told.get("bits", told.get("w_bit"))
        if method not in METHODS or bits != 4:
            raise ModelFormatError(
                f"{where} says the weights are quantized, by {method!r} with {bits!r} bits; allowed: "
                f"{' and '.join(METHODS)} with 4, float32, float16 and bfloat16 checkpoints, or a GGUF file"
            )
        size = told.get("group_size", told.get("q_group_size", 128))
        if type(size) is not int or (size != -1 and (size < GROUP or size % GROUP)):
            raise ModelFormatError(f"{where}: group_size is {size!r}; allowed: -1, or a multiple of {GROUP}")
        version = told.get("version", "gemm") if method == "awq" else told.get("checkpoint_format", "gptq")
        allowed = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
        if str(version).lower() not in allowed:
            raise ModelFormatError(f"{where}: the weights are packed as {version!r}; allowed: {', '.join(allowed)}")
        return cls(str(method), size, int(method == "gptq" and version != "gptq_v2"))

    def matrices(
        self, found: Mapping[str, SafetensorsFile]
    ) -> Iterator[tuple[str, npt.NDArray[np.float32] | Groups | RawTensor]]:
        """Every tensor of a checkpoint, `found` by name; a matrix of 4 bits under the name that it has unpacked."""
        for name, file in found.items():
            stem, _, part = name.rpartition(".")
            if part == "qweight":
                yield f"{stem}.weight", self._matrix(stem, found)
            elif part not in _PARTS or f"{stem}.qweight" not in found:
                yield name, file.raw(name)

    def _matrix(self, stem: str, found: Mapping[str, SafetensorsFile]) -> npt.NDArray[np.float32] | Groups:
        import numpy as np  # only when a tensor is touched

        from headway.modelfile.groups import Groups

        q, zeros, scales = self._numbers(stem, found)  # [in, out], [groups, out], [groups, out]
        num_in, num_groups = len(q), len(scales)
        order = self._order(stem, found, num_in, num_groups)
        if order is not None:
            weights: npt.NDArray[np.float32] = scales[order] * (q.astype(np.float32) - zeros[order])
            return np.ascontiguousarray(weights.T)
        times = num_in // num_groups // GROUP
        d, m = (np.repeat(side, times, axis=0).T for side in (scales, -scales * zeros))
        return Groups(np.ascontiguousarray(q.T), np.ascontiguousarray(d), np.ascontiguousarray(m))

    def _numbers(
        self, stem: str, found: Mapping[str, SafetensorsFile]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        import numpy as np

        words, zeros = (_words(found, f"{stem}.{part}") for part in ("qweight", "qzeros"))
        scales = _file(found, f"{stem}.scales").data(f"{stem}.scales")
        by_column = self.method == "awq"
        q = _unpacked(words, _AWQ_ORDER) if by_column else _unpacked(words.T, range(8)).T
        zero = _unpacked(zeros, _AWQ_ORDER if by_column else range(8)).astype(np.float32) + self.zero_offset
        size = len(q) if self.group_size == -1 else self.group_size
        fits = scales.ndim == 2 and scales.shape == zero.shape == (-(-len(q) // size), q.shape[1])
        if not fits or len(q) % size or size % GROUP:
            shapes = f"{list(words.shape)}, {list(zeros.shape)} and {list(scales.shape)}"
            raise ModelFormatError(f"{stem}: qweight, qzeros and scales are {shapes}, not groups of {size} inputs")
        return q, zero, scales

    def _order(
        self, stem: str, found: Mapping[str, SafetensorsFile], num_in: int, num_groups: int
    ) -> npt.NDArray[np.int32] | None:
        """Each input's group, where these are not simply one after the other."""
        import numpy as np

        if f"{stem}.g_idx" not in found:
            return None
        order = _words(found, f"{stem}.g_idx", dims=1).view(np.int32)
        if len(order) != num_in or order.min() < 0 or order.max() >= num_groups:
            raise ModelFormatError(f"{stem}.g_idx does not name one of {num_groups} groups for each of {num_in} inputs")
        return None if np.array_equal(order, np.arange(num_in) // (num_in // num_groups)) else order


def _file(found: Mapping[str, SafetensorsFile], name: str) -> SafetensorsFile:
    if name not in found:
        raise ModelFormatError(f"the checkpoint lacks {name!r}, which belongs to a matrix of 4 bits")
    return found[name]


def _words(found: Mapping[str, SafetensorsFile], name: str, dims: int = 2) -> npt.NDArray[np.uint32]:
    import numpy as np

    raw = _file(found, name).raw(name)
    if raw.type != "I32" or len(raw.shape) != dims or 0 in raw.shape:
        raise ModelFormatError(f"{name!r} is {raw.type} {list(raw.shape)}; allowed: I32 with {dims} dimensions")
    return np.frombuffer(raw.data, "<u4").reshape(raw.shape)


def _unpacked(words: npt.NDArray[np.uint32], order: tuple[int, ...] | range) -> npt.NDArray[np.uint8]:
    """Words [rows, n] as numbers of 4 bits [rows, 8 n]; nibble i belongs to column order[i] of its eight."""
    import numpy as np

    out = np.empty((*words.shape, 8), np.uint8)
    for nibble, column in enumerate(order):
        out[:, :, column] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
    return out.reshape(len(words), -1)
