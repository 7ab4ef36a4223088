"""Vectors beside transformers': python tools/compare_embeddings.py DIRECTORY TEXTS.jsonl [--field question]

Both make vectors of the same texts, in turns on the same threads: headway as its server's process does, transformers
in padded batches of 32. Prints tokens per second of each round, the medians' ratio, and the smallest cosine between
the two. Status 1 if that is below 0.9999, or if a text's vector has other bits alone than with all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from headway.embedding.model import EmbeddingModel, load_embedding_model
from headway.embedding.source import open_embedding_source
from headway.modelfile.cache import ModelCache, default_root
from headway.text.tokenizer import Tokenizer

BATCH = 32
LEAST_COSINE = 0.9999


class Theirs:
    """Padded batches by transformers, pooled as the directory says."""

    def __init__(self, folder: Path, pooling: str) -> None:
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._pooling = pooling

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        parts = [self._batch(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)]
        return np.concatenate(parts)

    def _batch(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:
            last = torch.zeros(len(texts), dtype=torch.long) if self._pooling == "cls" else mask.sum(1) - 1
            pooled = hidden[torch.arange(len(texts)), last]
        vectors: np.ndarray = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors


def timed(embed: Callable[[Sequence[Sequence[int]]], np.ndarray], texts: list[list[int]]) -> float:
    begun = time.perf_counter()
    embed(texts)
    return sum(map(len, texts)) / (time.perf_counter() - begun)


def alone_differs(model: EmbeddingModel, texts: list[list[int]], together: np.ndarray) -> int:
    """How many of some texts have another vector alone."""
    step = max(1, len(texts) // 50)
    return sum(not np.array_equal(model.embed([texts[at]])[0], together[at]) for at in range(0, len(texts), step))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, help="one JSON object a line")
    parser.add_argument("--field", default="question", help="which field of it is the text")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = open_embedding_source(str(args.model), ModelCache(default_root()))
    ours = load_embedding_model(source, "auto", args.threads)
    theirs = Theirs(args.model, source.pooling)
    tokenizer = Tokenizer.open(source.tokenizer)
    lines = args.texts.read_text("utf-8").splitlines()[: args.count]
    texts = [tokenizer.encode(str(json.loads(line)[args.field]))[: ours.max_tokens] for line in lines]
    together, wanted = ours.embed(texts), theirs.embed(texts)  # which warms both up
    cosine = float((together.astype(np.float64) * wanted).sum(1).min())
    rounds = [(timed(ours.embed, texts), timed(theirs.embed, texts)) for _ in range(args.rounds)]
    num_tokens, differ = sum(map(len, texts)), alone_differs(ours, texts, together)
    print(
        f"{source.name}: {len(texts)} texts, {num_tokens} tokens, {ours.dtype}, {ours.kernels}, {args.threads} threads"
    )
    for mine, other in rounds:
        print(f"  headway {mine:8.0f}   transformers {other:8.0f} tokens per second")
    ratio = statistics.median(mine for mine, _ in rounds) / statistics.median(other for _, other in rounds)
    print(f"ratio of medians {ratio:.2f}; smallest cosine {cosine:.8f}; {differ} texts with other bits alone")
    return int(cosine < LEAST_COSINE or differ > 0)


if __name__ == "__main__":
    sys.exit(main())
