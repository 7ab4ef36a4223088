"""What a number format costs in quality: perplexity over a text, and how often the likeliest token stays the same.

The text is cut into windows; each is read from an empty context by the production decoder, through a paged KV store,
and every token but a window's first is predicted from those before it. float32 weights and KV are the measure; every
other combination asked for is held against them, token by token. For a model whose file is quantized, float32 means
its dequantized weights.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench.console import Update, print_json, print_table, progress
from headway.bench.setup import ModelSetup, at_least_one
from headway.errors import ConfigError
from headway.kernels.formats import resolve_kv_dtype
from headway.modelfile.source import ModelSource
from headway.models.batch import ForwardBatch
from headway.runner.kvstore import KVStore
from headway.text.tokenizer import Tokenizer

CHUNK = 256  # positions whose logits exist at once: 50 MB of a vocabulary of 49,152
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Read:
    """What one combination of formats made of the text, one entry per predicted token."""

    nats: NDArray[np.float64]  # minus the log probability of the token that came
    best: NDArray[np.int64]  # the likeliest token

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.nats.mean()))


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One line of the table."""

    dtype: str
    kv_dtype: str
    perplexity: float
    change: float  # against float32, as a share
    same_top1: float  # share of positions whose likeliest token is float32's


def run(setup: ModelSetup, *, text: Path, tokens: int = 20_000, window: int = 1024, as_json: bool = False) -> int:
    """Print a line per combination; `setup.dtype` and `setup.kv_dtype` may name several, with commas."""
    at_least_one(tokens=tokens - 1, window=window - 1)
    words = read_text(text)
    exact = replace(setup, dtype="float32", kv_dtype="float32")
    rows: list[QualityRow] = []
    kernels = ""
    for variant in (exact, *(one for one in variants(setup) if one != exact)):
        loaded = load_model(variant.config())
        kv_dtype = resolve_kv_dtype(variant.config().cache.kv_dtype, loaded.device.dtype)
        ids = encode(loaded.source, words, tokens)
        if window > loaded.spec.max_len:
            raise ConfigError(f"window is {window}; this model's context allows at most {loaded.spec.max_len}")
        with progress(f"{loaded.device.dtype}, KV {kv_dtype}", len(ids)) as update:
            found = read_windows(loaded, kv_dtype, ids, window, update)
        if not rows:
            measure, kernels = found, loaded.device.kernels.name
        rows.append(_row(loaded.device.dtype, kv_dtype, found, measure))
    title = f"{len(ids)} tokens of {text.name} in windows of {window}, {kernels}"
    names = ("weights", "KV", "perplexity", "change", "same likeliest token")
    cells = [(r.dtype, r.kv_dtype, f"{r.perplexity:.4f}", f"{r.change:+.2%}", f"{r.same_top1:.2%}") for r in rows]
    print_table(names, cells, title)
    if as_json:
        facts = {"text": text.name, "tokens": len(ids), "window": window, "kernels": kernels}
        print_json(facts | {"model": loaded.source.name, "rows": [asdict(row) for row in rows]})
    return 0


def variants(setup: ModelSetup) -> Iterator[ModelSetup]:
    """Every combination of the formats named."""
    dtypes, kv_dtypes = ((value or "auto").split(",") for value in (setup.dtype, setup.kv_dtype))
    for dtype, kv_dtype in itertools.product(dtypes, kv_dtypes):
        yield replace(setup, dtype=dtype.strip(), kv_dtype=kv_dtype.strip())


def read_text(path: Path) -> str:
    """A text file, or the contexts of a JSON file in the form of SQuAD: in order, each once, an empty line between."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return text
        paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
        return "\n\n".join(dict.fromkeys(str(paragraph["context"]) for paragraph in paragraphs))
    except OSError as error:
        raise ConfigError(f"cannot read the text {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is neither UTF-8 text nor JSON in the form of SQuAD, data[].paragraphs[].context: {error!r}"
        ) from error


def encode(source: ModelSource, text: str, count: int) -> list[int]:
    """The first `count` tokens of a text; refuses one that has fewer than two."""
    ids = Tokenizer.open(source.tokenizer_path()).encode(text, add_special=False)[:count]
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one")
    return ids


def read_windows(loaded: LoadedCpu, kv_dtype: str, ids: Sequence[int], window: int, update: Update) -> Read:
    """Predict every token of every window but its first."""
    spec = loaded.spec
    num_blocks = -(-window // BLOCK_SIZE)
    shape = {"layers": spec.layers, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    kv = KVStore(num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, **shape)
    nats: list[NDArray[np.float64]] = []
    best: list[NDArray[np.int64]] = []
    for start, at in _chunks(len(ids), window):
        end = min(at + CHUNK, start + window, len(ids))
        batch = make_batch(ids[at:end], at - start, num_blocks)
        logits = loaded.decoder.forward(batch, kv.data)[: min(end, start + window - 1, len(ids) - 1) - at]
        target = np.array(ids[at + 1 : at + 1 + len(logits)])
        best.append(logits.argmax(-1))
        largest = logits.max(-1, keepdims=True)
        fine = (logits - largest).astype(np.float64)
        nats.append(np.log(np.exp(fine).sum(-1)) - fine[np.arange(len(target)), target])
        update(end)
    return Read(np.concatenate(nats), np.concatenate(best))


def make_batch(tokens: Sequence[int], start: int, num_blocks: int) -> ForwardBatch:
    """One row that computes and samples all of `tokens`, from position `start` on; its blocks lie in order."""
    count = len(tokens)
    positions = np.arange(start, start + count)
    return ForwardBatch(
        tokens=np.array(tokens, np.int64),
        positions=positions,
        slot_map=positions,
        row_of=np.zeros(count, np.int32),
        tables=np.arange(num_blocks, dtype=np.int32)[None],
        query_start=np.array([0, count], np.int32),
        context=np.array([start + count], np.int32),
        sample_index=np.arange(count),
        block_size=BLOCK_SIZE,
    )


def _chunks(count: int, window: int) -> Iterator[tuple[int, int]]:
    """(start of the window, start of the chunk), where at least one token follows to be predicted."""
    for start in range(0, count - 1, window):
        for at in range(start, min(start + window, count) - 1, CHUNK):
            yield start, at


def _row(dtype: str, kv_dtype: str, found: Read, measure: Read) -> QualityRow:
    change = found.perplexity / measure.perplexity - 1
    same = float((found.best == measure.best).mean())
    return QualityRow(dtype, kv_dtype, round(found.perplexity, 4), round(change, 5), round(same, 5))
