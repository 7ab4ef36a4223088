"""Small random models, and a driver that runs requests through a decoder in any batches and chunks.

For every test that needs a real model and no file. The driver's KV cells start as NaN and its blocks are dealt in
random order, so that a cell read before it is written, or through a wrong table, shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.kernels import native, ref
from headway.kernels.ops import KernelSet
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.params import ModelWeights
from headway.models.registry import parameters
from headway.models.spec import ModelSpec
from headway.runner.weights import pack_weights


def tiny_spec(**changes: object) -> ModelSpec:
    """Two layers, grouped heads, and by default no size that a vector register would like."""
    values: dict[str, object] = {
        "family": "llama",
        "vocab_size": 131,
        "hidden": 60,
        "intermediate": 77,
        "layers": 2,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_len": 512,
        "tie_embeddings": True,
    }
    return ModelSpec(**{**values, **changes})  # type: ignore[arg-type]


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint of such a model: name -> float32 array."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for param in parameters(spec):
        for part in param.parts:
            values = rng.standard_normal(param.part_shape(part), np.float32)
            # Spread so that logits are a few units wide and neighbours matter.
            values *= 1.5 / np.sqrt(param.columns) if param.is_matrix else 0.1
            if part.source.endswith("norm.weight"):
                values += 1.0
            tensors[part.source] = values
    return tensors


def tiny_decoder(spec: ModelSpec | None = None, kernels: KernelSet | None = None, seed: int = 0) -> Decoder:
    spec = spec or tiny_spec()
    kernels = kernels or ref.load()
    packed = dict(pack_weights(random_tensors(spec, seed).items(), spec, kernels))
    return Decoder(spec, ModelWeights(packed, kernels.layout), kernels)


def kernel_sets(threads: int = 1) -> list[KernelSet]:
    """Every set this machine can run."""
    found = native.load(threads)
    return [ref.load()] if found is None else [ref.load(), found]


@dataclass(slots=True)
class Row:
    """A request on its way: `done` tokens have their KV in the blocks of `table`."""

    tokens: list[int]
    table: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Driver:
    """Owns a KV pool and runs sequences over it; every computed token's logits are kept."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 200, block_size: int = 16, seed: int = 0) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.block_size = block_size
        kv_heads = decoder.shard.share(spec.kv_heads) if isinstance(decoder, Decoder) else range(spec.kv_heads)
        shape = (spec.layers, 2, num_blocks, block_size, len(kv_heads), spec.head_dim)
        self.kv = np.full(shape, np.nan, np.float32)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def add(self, tokens: Sequence[int], shared: Row | None = None, hit: int = 0) -> Row:
        """A new sequence; its first `hit` tokens are found in the blocks of `shared`."""
        assert hit % self.block_size == 0
        table = list(shared.table[: hit // self.block_size]) if shared else []
        while len(table) * self.block_size < len(tokens):
            table.append(self._free.pop())
        return Row(list(tokens), table, hit)

    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Compute the next `count` tokens of each sequence in one batch."""
        batch = self.batch(work)
        logits = torch.from_numpy(self.decoder.forward(batch, self.kv))
        start = 0
        for seq, count in work:
            seq.logits.extend(logits[start : start + count].clone())
            seq.done += count
            start += count

    def batch(self, work: Sequence[tuple[Row, int]]) -> ForwardBatch:
        tokens, positions, slots, row_of, starts, context = [], [], [], [], [0], []
        tables = np.zeros((len(work), max(len(seq.table) for seq, _ in work)), np.int32)
        for row, (seq, count) in enumerate(work):
            tables[row, : len(seq.table)] = seq.table
            span = range(seq.done, seq.done + count)
            tokens += seq.tokens[seq.done : seq.done + count]
            positions += span
            slots += [seq.table[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            row_of += [row] * count
            starts.append(len(tokens))
            context.append(seq.done + count)
        return ForwardBatch(
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            slot_map=np.array(slots, np.int64),
            row_of=np.array(row_of, np.int32),
            tables=tables,
            query_start=np.array(starts, np.int32),
            context=np.array(context, np.int32),
            sample_index=np.arange(len(tokens)),
            block_size=self.block_size,
        )


def logits_alone(decoder: Decoder, tokens: Sequence[int], block_size: int = 16) -> Tensor:
    """[len(tokens), vocab]: the whole sequence alone in one batch."""
    driver = Driver(decoder, block_size=block_size, num_blocks=-(-len(tokens) // block_size))
    seq = driver.add(tokens)
    driver.step([(seq, len(tokens))])
    return torch.stack(seq.logits)


def run_in_random_company(
    decoder: Decoder, prompts: Sequence[Sequence[int]], block_size: int, seed: int
) -> list[Tensor]:
    """All prompts together, in random chunks, random order and random batches; one [len, vocab] per prompt."""
    rng = random.Random(seed)
    driver = Driver(decoder, block_size=block_size, num_blocks=4000 // block_size, seed=seed)
    seqs = [driver.add(tokens) for tokens in prompts]
    while waiting := [seq for seq in seqs if seq.done < len(seq.tokens)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        longest = rng.choice((1, 2, 7, 16, 33, 1000))
        driver.step([(seq, min(rng.randint(1, longest), len(seq.tokens) - seq.done)) for seq in chosen])
    return [torch.stack(seq.logits) for seq in seqs]
