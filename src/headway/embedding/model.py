"""The model behind the vectors: token ids of texts in, a unit vector for each out.

A text's vector has the same bits alone and beside any others: kernels compute each row by itself, and pooling takes one
text at a time. Layers share one scratch layer of keys and values, since nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headway.embedding.source import EmbeddingSource
from headway.kernels import select
from headway.kernels.checks import Array
from headway.modelfile.groups import Groups
from headway.modelfile.source import ModelSource
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.encoder import Encoder, TextRows
from headway.models.encoder_spec import read_encoder
from headway.models.registry import read_config
from headway.runner.weights import load_weights

SLICE_TOKENS = 2048  # computed at a time, a longer text alone
_ENCODER_DTYPE = "float32"
_DECODER_DTYPE = "bfloat16"


class TextModel(Protocol):
    """What gives a vector for each token."""

    hidden_size: int
    max_len: int
    vocab_size: int

    def hidden(self, tokens: NDArray[np.int64], rows: TextRows) -> Array:
        """[T, hidden_size], of texts side by side."""


class EncoderTexts:
    """An encoder as a `TextModel`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.hidden_size = encoder.spec.hidden
        self.max_len = encoder.spec.max_len
        self.vocab_size = encoder.spec.vocab_size

    def hidden(self, tokens: NDArray[np.int64], rows: TextRows) -> Array:
        return self._encoder.hidden(tokens, rows)


class DecoderTexts:
    """A decoder as a `TextModel`: each token sees those before it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.hidden_size = decoder.spec.hidden
        self.max_len = decoder.spec.max_len
        self.vocab_size = decoder.spec.vocab_size

    def hidden(self, tokens: NDArray[np.int64], rows: TextRows) -> Array:
        spec = self._decoder.spec
        scratch = np.empty((2, rows.num_blocks, rows.block_size, spec.kv_heads, spec.head_dim), np.float32)
        # Every layer is the same memory: a layer's keys are needed until its own attention is done.
        kv = as_strided(scratch, (spec.layers, *scratch.shape), (0, *scratch.strides))
        batch = ForwardBatch(
            tokens=tokens,
            positions=rows.places,
            slot_map=rows.slot_map,
            row_of=rows.row_of,
            tables=rows.tables,
            query_start=rows.query_start,
            context=rows.context,
            sample_index=np.arange(len(tokens)),
            block_size=rows.block_size,
        )
        return self._decoder.hidden(batch, kv)


class EmbeddingModel:
    """Pooled, scaled to length 1."""

    def __init__(
        self, texts: TextModel, pooling: str, max_tokens: int | None = None, *, dtype: str = "", kernels: str = ""
    ) -> None:
        self.dtype, self.kernels = dtype, kernels
        self._texts = texts
        self._pooling = pooling
        self.size = texts.hidden_size
        self.vocab_size = texts.vocab_size
        self.max_tokens = min(texts.max_len, max_tokens or texts.max_len)

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[N, size] unit vectors; every text has 1 to `max_tokens` tokens of the vocabulary."""
        vectors = np.empty((len(texts), self.size), np.float32)
        for part in _slices(texts):
            rows = TextRows.of([len(texts[at]) for at in part])
            hidden = self._texts.hidden(np.concatenate([np.array(texts[at], np.int64) for at in part]), rows)
            starts = rows.query_start
            for row, at in enumerate(part):
                vectors[at] = _pooled(hidden[starts[row] : starts[row + 1]], self._pooling)
        return vectors


def _slices(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of texts that are computed together."""
    part: list[int] = []
    num_tokens = 0
    for at, text in enumerate(texts):
        if part and num_tokens + len(text) > SLICE_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(at)
        num_tokens += len(text)
    if part:
        yield part


def _pooled(hidden: Array, pooling: str) -> NDArray[np.float32]:
    """One text's token vectors [n, size] as one of length 1; zeros stay zeros."""
    if pooling == "mean":
        vector = hidden.mean(axis=0, dtype=np.float64)
    else:
        vector = hidden[0 if pooling == "cls" else -1].astype(np.float64)
    length = float(np.sqrt(np.square(vector).sum()))
    scaled: NDArray[np.float32] = (vector / (length or 1.0)).astype(np.float32)
    return scaled


def load_embedding_model(source: EmbeddingSource, kernels: str, threads: int) -> EmbeddingModel:
    """Read the weights: an encoder's as they are, a decoder's rounded to bfloat16 and kept in the cache."""
    dtype = _DECODER_DTYPE if source.encoder is None else _ENCODER_DTYPE
    chosen = select.load(kernels, threads, dtype)
    if source.encoder is not None:
        spec = read_encoder(source.encoder.config)
        texts: TextModel = EncoderTexts(Encoder(spec, source.encoder.tensors(), chosen))
    else:
        assert source.decoder is not None
        decoder_spec = read_config(source.decoder.config)
        weights = load_weights(_Named(source.decoder), decoder_spec, source.decoder.cache, chosen)
        texts = DecoderTexts(Decoder(decoder_spec, weights, chosen))
    return EmbeddingModel(texts, source.pooling, source.max_tokens, dtype=dtype, kernels=chosen.name)


class _Named:
    """A decoder's checkpoint with the names of one that has a head: some are saved without it, and without `model.`."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.digest = source.digest

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, tensor in self._source.tensors():
            yield _named(name), tensor

    def grouped(self) -> Iterator[tuple[str, NDArray[np.float32] | Groups]]:
        for name, tensor in self._source.grouped():
            yield _named(name), tensor


def _named(name: str) -> str:
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
