"""The decoder as one native call per step, and the choice between it and the decoder of single operations.

It owns the list of weights that the library is given and the checks of what a step passes by address. What is computed
is said in `decoder`, whose bits it gives; how, in the C++ files decoder.cpp and step.cpp. Requests and sampling stay
outside.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, EngineError
from headway.kernels.checks import Array, address, expect, is_flat, is_index
from headway.kernels.kv_format import format_of
from headway.kernels.library import ACTIVATION_CODES, Context
from headway.kernels.ops import KernelSet
from headway.layers.rope import RopeTable
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.params import NORMS, ModelWeights
from headway.models.pick import Allowed
from headway.models.rotary import rope_tables
from headway.models.spec import ModelSpec, beyond

log = logging.getLogger(__name__)

_KNOWN = frozenset(
    {
        *("family", "vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "norm_eps"),
        *("rope_theta", "rope_scaling", "max_len", "tie_embeddings", "qkv_bias", "qk_norm", "qk_norm_is_wide"),
        *("norms", "norm_offset", "activation", "embed_scale", "residual_scale", "logit_scale", "logit_cap"),
        *("attn_scale", "attn_cap", "rotary_dim", "windows", "window_rope_theta"),
    }
)
"""Fields of a spec that the native decoder heeds."""
_FORMAT_WORD = 1  # of the header of a packed matrix
_FAULTS = {
    1: "a token is outside 0..{vocab}",
    2: "a position is outside its table or the rotary tables of {length}",
    3: "a slot is outside 0..{cell}",
    4: "a row or a block of its table is outside the {tables} tables or the {blocks} blocks",
    5: "a sampled token is outside 0..{row}",
    6: "there is no memory for {rows} tokens at once; lower max_num_batched_tokens",
    7: "the mask of a sampled token is none of those that came",
    8: "the adapter of a token is none of those that came",
}


def unsupported(spec: ModelSpec) -> str:
    """Why the native decoder cannot run a model of this spec; empty where it can.

    A field that a spec has and `_KNOWN` has not is one that decoder.cpp does not read: it must be at its default.
    """
    strange = beyond(spec, _KNOWN)
    return f"the native decoder does not know {', '.join(strange)}" if strange else ""


def fit_kernels(kernels: KernelSet, spec: ModelSpec) -> KernelSet:
    """The kernels for a model of this spec: without the native decoder, and saying so, where it cannot run it."""
    reason = unsupported(spec)
    if kernels.native is None or not reason:
        return kernels
    log.warning("%s; running the slower decoder of single operations", reason)
    return replace(kernels, native=None, fallback="; ".join(filter(None, (kernels.fallback, reason))))


def make_decoder(spec: ModelSpec, weights: ModelWeights[Array], kernels: KernelSet) -> Decoder | NativeDecoder:
    """The native decoder where the kernels come with one that runs such a model, else the one of single operations."""
    kernels = fit_kernels(kernels, spec)
    if kernels.native is None:
        return Decoder(spec, weights, kernels)
    return NativeDecoder(spec, weights, kernels.native)


class NativeDecoder:
    """`Decoder` over the same weights gives the same bits. The weights stay alive and unmoved as long as this does."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights[Array], context: Context) -> None:
        self.spec = spec
        self._weights = weights
        self._ropes = rope_tables(spec)
        numbers = (spec.vocab_size, spec.hidden, spec.intermediate, spec.layers, spec.heads, spec.kv_heads)
        kinds = (spec.rope_size, ACTIVATION_CODES[spec.activation], spec.qk_norm_is_wide)
        sizes = np.array([*numbers, spec.head_dim, spec.max_len, *kinds], np.int64)
        scales = (spec.score_scale, spec.embed_scale, spec.residual_scale, spec.logit_scale)
        factors = np.array([spec.norm_eps, *scales, spec.logit_cap, spec.attn_cap], np.float32)
        table = np.array(_addresses(spec, weights, self._ropes), np.int64)
        model = context.make_decoder(address(sizes), address(factors), address(table))
        if model is None:
            raise ConfigError(f"the native decoder cannot use these weights ({weights.layout}); use kernels ref")
        self._model = model

    def forward(self, batch: ForwardBatch, kv: Array) -> NDArray[np.float32]:
        """See `Decoder.forward`."""
        logits = np.empty((batch.sample_index.shape[0], self.spec.vocab_size), np.float32)
        self._run(batch, kv, address(logits), None)
        return logits

    def pick(self, batch: ForwardBatch, kv: Array, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """Like `forward`, of which only the greedy choice is kept: [S] as in `best_tokens`."""
        best = np.empty(batch.sample_index.shape[0], np.int64)
        self._run(batch, kv, None, address(best), allowed)
        return best

    def _run(
        self, batch: ForwardBatch, kv: Array, logits: int | None, best: int | None, allowed: Allowed | None = None
    ) -> None:
        tokens, tables = batch.tokens, batch.tables
        rows, adapters = tokens.shape[0], batch.adapters
        self._check(batch, kv)
        table = None if adapters is None else np.array([address(each.words) for each in adapters.table], np.int64)
        status = self._model.forward(
            *(address(tokens), address(batch.positions), address(batch.slot_map), address(batch.row_of), rows),
            *(address(tables), tables.shape[0], tables.shape[1]),
            *(address(batch.sample_index), batch.sample_index.shape[0]),
            *(address(kv), format_of(kv).code, kv.shape[2], kv.shape[3], logits, best),
            *((None, 0, None) if allowed is None else self._masks(allowed, batch.sample_index.shape[0])),
            *(None if adapters is None else address(adapters.of), None if table is None else address(table)),
            *(0 if table is None else len(table),),
        )
        if status:
            fault = _FAULTS[status].format(
                vocab=self.spec.vocab_size - 1,
                length=self.spec.max_len,
                cell=kv.shape[2] * kv.shape[3] - 1,
                tables=tables.shape[0],
                blocks=kv.shape[2],
                row=rows - 1,
                rows=rows,
            )
            raise EngineError(f"the native decoder cannot run this step: {fault}")

    def _masks(self, allowed: Allowed, num_samples: int) -> tuple[int, int, int]:
        bits, width = allowed.bits, -(-self.spec.vocab_size // 8)
        fits = bits.ndim == 2 and bits.dtype == np.uint8 and bits.flags.c_contiguous and bits.shape[1] == width
        expect(fits, "decoder", "bits", bits, f"contiguous uint8 [masks, {width}]")
        lines = allowed.line_of
        expect(is_index(lines, np.int32, num_samples), "decoder", "line_of", lines, f"int32 [{num_samples}]")
        return address(bits), bits.shape[0], address(lines)

    def _check(self, batch: ForwardBatch, kv: Array) -> None:
        rows = batch.tokens.shape[0]
        for name in ("tokens", "positions", "slot_map"):
            value: Array = getattr(batch, name)
            expect(is_index(value, np.int64, rows), "decoder", name, value, f"contiguous int64 [{rows}]")
        expect(is_index(batch.row_of, np.int32, rows), "decoder", "row_of", batch.row_of, f"int32 [{rows}]")
        if batch.adapters is not None:
            of = batch.adapters.of
            expect(is_index(of, np.int32, rows), "decoder", "adapters.of", of, f"int32 [{rows}]")
        sampled, tables, spec = batch.sample_index, batch.tables, self.spec
        expect(is_index(sampled, np.int64), "decoder", "sample_index", sampled, "contiguous int64 [S]")
        fits = tables.ndim == 2 and tables.dtype == np.int32 and tables.flags.c_contiguous
        expect(fits, "decoder", "tables", tables, "contiguous int32 [R, W]")
        width = format_of(kv).head_size(spec.head_dim)
        fits = kv.ndim == 6 and kv.flags.c_contiguous
        fits = fits and kv.shape[:2] == (spec.layers, 2) and kv.shape[3:] == (batch.block_size, spec.kv_heads, width)
        wanted = f"contiguous [{spec.layers}, 2, blocks, {batch.block_size}, {spec.kv_heads}, {width}]"
        expect(fits, "decoder", "kv", kv, wanted)


def _addresses(spec: ModelSpec, weights: ModelWeights[Array], ropes: Sequence[RopeTable]) -> list[int]:
    """As decoder.cpp reads them: a matrix is (address, format, bytes), a vector its address, 0 where there is none."""
    norms, wide = NORMS[spec.norms], spec.qk_norm_is_wide
    words = [*_matrix(weights["embed"]), *_matrix(weights["embed" if spec.tie_embeddings else "head"])]
    words.append(_vector(weights["norm"], spec.hidden))
    for index in range(spec.layers):
        prefix = f"layers.{index}."
        for name in ("qkv", "o", "gate_up", "down"):
            words += _matrix(weights[prefix + name])
        for name, size, is_there in (
            *(
                (name, spec.hidden, name in norms)
                for name in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
            ),
            ("qkv_bias", spec.q_size + 2 * spec.kv_size, spec.qkv_bias),
            ("q_norm", spec.q_size if wide else spec.head_dim, spec.qk_norm),
            ("k_norm", spec.kv_size if wide else spec.head_dim, spec.qk_norm),
        ):
            words.append(_vector(weights[prefix + name], size) if is_there else 0)
        window = spec.window(index)
        rope = ropes[window > 0]
        words += [address(rope.cos), address(rope.sin), window]
    return words


def _matrix(packed: Array) -> tuple[int, int, int]:
    is_plain = packed.dtype == np.float32
    expect(packed.flags.c_contiguous, "decoder", "a matrix", packed, "contiguous")
    number = 0 if is_plain else int(packed[:64].view(np.int64)[_FORMAT_WORD])
    return address(packed), number, packed.nbytes


def _vector(vector: Array, size: int) -> int:
    expect(is_flat(vector) and vector.shape == (size,), "decoder", "a vector", vector, f"float32 [{size}]")
    return address(vector)
