"""Baselines for continuous batching: naive (one request at a time) and static batches, over the same kernels.

    static-4   ████████████░░░░░░░░   a batch lasts as long as its longest answer: finished slots (░) are computed
               ████████████████████   until then, as padding is, and no request is admitted meanwhile
               ████░░░░░░░░░░░░░░░░
               ███████░░░░░░░░░░░░░   every slot reserves the longest prompt plus the longest answer of its batch

Prompts are padded at their end to the longest of the batch; a causal model's answers do not see that padding, so
the tokens are those of any other engine. Naive is static-1. These drive the decoder and a KV store directly: no
scheduler, no paging, no sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.bench.console import Update
from headway.bench.workload import WorkItem
from headway.models.batch import ForwardBatch
from headway.runner.kvstore import KVStore
from headway.runner.step_model import StepModel

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a workload in the order of its requests, and the number of steps."""

    tokens: list[list[int]]
    steps: int


def room_per_slot(works: Sequence[WorkItem], slots: int) -> int:
    """Tokens that a slot must hold for the worst batch."""
    return max(_longest(batch) for batch in _batches(works, slots))


class Static:
    """Slot i owns block i of the store: position p of its request lies in cache cell i * block_size + p.

    A block holds `room_per_slot` tokens. A step computes at most `tokens_per_step` tokens of prompts, or one prompt.
    """

    def __init__(self, model: StepModel, kv: KVStore, slots: int, tokens_per_step: int) -> None:
        self._model = model
        self._kv = kv
        self._slots = slots
        self._tokens_per_step = tokens_per_step
        self._steps = 0

    def answer(self, works: Sequence[WorkItem], update: Update) -> Answers:
        """Answer every request, in batches, in order of arrival."""
        self._steps = 0
        answers: list[list[int]] = []
        for batch in _batches(works, self._slots):
            answers += self._answer(batch)
            update(sum(map(len, answers)))
        return Answers(answers, self._steps)

    def close(self) -> None:
        """Nothing runs between answers."""

    def _answer(self, batch: Sequence[WorkItem]) -> list[list[int]]:
        lengths = np.array([len(work.tokens) for work in batch], np.int64)
        newest = self._prefill(batch, lengths)
        columns = [newest]
        slots, first = np.arange(len(batch)), np.zeros(len(batch), np.int64)
        for step in range(max(work.max_tokens for work in batch) - 1):
            newest = self._forward(newest[:, None], slots, lengths + step, first)
            columns.append(newest)
        table = np.stack(columns, axis=1)
        return [table[slot, : work.max_tokens].tolist() for slot, work in enumerate(batch)]

    def _prefill(self, batch: Sequence[WorkItem], lengths: Ints) -> Ints:
        """The first token of each slot. A step takes as many slots as its token budget allows."""
        width = int(lengths.max())
        padded = np.zeros((len(batch), width), np.int64)
        for slot, work in enumerate(batch):
            padded[slot, : len(work.tokens)] = work.tokens
        share = max(1, self._tokens_per_step // width)
        first: list[Ints] = []
        for start in range(0, len(batch), share):
            part = slice(start, min(start + share, len(batch)))
            slots = np.arange(part.start, part.stop)
            first.append(self._forward(padded[part], slots, np.zeros(len(slots), np.int64), lengths[part] - 1))
        return np.concatenate(first)

    def _forward(self, tokens: Ints, slots: Ints, starts: Ints, sampled: Ints) -> Ints:
        """Compute tokens [n, width] of some slots from positions `starts` on; return the most likely token after
        the one at `sampled` of each."""
        self._steps += 1
        count, width = tokens.shape
        block_size = self._kv.block_size
        positions = starts[:, None] + np.arange(width)
        batch = ForwardBatch(
            tokens=tokens.reshape(-1),
            positions=positions.reshape(-1),
            slot_map=(slots[:, None] * block_size + positions).reshape(-1),
            row_of=np.arange(count, dtype=np.int32).repeat(width),
            tables=slots.astype(np.int32)[:, None],
            query_start=np.arange(0, count * width + 1, width, dtype=np.int32),
            context=(starts + width).astype(np.int32),
            sample_index=np.arange(count) * width + sampled,
            block_size=block_size,
        )
        return self._model.pick(batch, self._kv.data)


def _batches(works: Sequence[WorkItem], slots: int) -> list[Sequence[WorkItem]]:
    return [works[start : start + slots] for start in range(0, len(works), slots)]


def _longest(batch: Sequence[WorkItem]) -> int:
    return max(len(work.tokens) for work in batch) + max(work.max_tokens for work in batch)
