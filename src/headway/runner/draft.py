"""A draft model beside the model that answers: it guesses tokens of rows that ask for some, before a step verifies.

    a chunk that asks for 3      known tokens … t │ g1 g2 g3          its KV store has the blocks of the model's own,
    draft model computes     [ not computed … t ]→g1→g2→g3             so that tables, copies and sharing hold for both

Of each block it knows how many leading tokens its own KV covers. What is missing, because only the model computed it
or it came from elsewhere, is computed when a row next asks for guesses, some of it per step. Every guess is verified,
so nothing here can change a token; where something fails there is no guess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.models.batch import ForwardBatch
from headway.runner.inputs import batch_of
from headway.runner.kvstore import KVStore
from headway.runner.sampler import Ints, sample
from headway.runner.slots import Slots
from headway.runner.step_model import StepModel
from headway.values.plan import BlockCopy, Chunk, Samples, StepPlan, Tier

log = logging.getLogger(__name__)

CATCH_UP = 256  # tokens of all rows that a step computes behind the model's, before any guess
MOST_BEHIND = 16  # tokens: a row that is farther behind catches up in this step and guesses in the next one


class DraftModel:
    """`_filled[block]` leading tokens of a block have KV here, for the tokens that the model's own block has."""

    def __init__(self, model: StepModel, kv: KVStore, slots: Slots, max_len: int) -> None:
        self._model = model
        self._kv = kv
        self._slots = slots
        self._max_len = max_len
        self._filled = {
            Tier.DEVICE: np.zeros(kv.num_blocks, np.int64),
            Tier.HOST: np.zeros(max(1, kv.host_blocks), np.int64),
        }

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """What the plan copies of the model's KV."""
        self._kv.copy(copies)
        for src, dst in copies:
            self._filled[dst.tier][dst.id] = self._filled[src.tier][src.id]

    def forget(self, block: int) -> None:
        """The block has other KV now, which came from elsewhere."""
        self._filled[Tier.DEVICE][block] = 0

    def guess(self, plan: StepPlan) -> StepPlan:
        """The plan with the tokens that it asks for; where there are none, the chunk samples one token."""
        self._forget_written(plan)
        asking = [chunk for chunk in plan.chunks if chunk.num_drafts]
        if not asking:
            return plan
        try:
            guesses = self._guesses(asking)
        except Exception:
            log.exception("the draft model failed in plan %s; the step goes on without guesses", plan.id)
            guesses = {}
        chunks = [_with(chunk, guesses.get(chunk.row, ())) if chunk.num_drafts else chunk for chunk in plan.chunks]
        return replace(plan, chunks=chunks)

    def _forget_written(self, plan: StepPlan) -> None:
        """What the step computes is not what these blocks held before."""
        slots, filled, size = self._slots, self._filled[Tier.DEVICE], self._slots.block_size
        rows: Ints = np.array([*plan.decode, *(chunk.row for chunk in plan.chunks if chunk.count)], np.int64)
        rows = rows[(rows >= 0) & (rows < slots.num_rows)]
        starts: Ints = np.minimum(slots.length[rows], np.maximum(slots.room[rows] - 1, 0))
        np.minimum.at(filled, slots.tables[rows, starts // size], starts % size)
        for chunk in plan.chunks:
            if chunk.count and 0 <= chunk.row < slots.num_rows:
                first, last = chunk.start // size, (chunk.start + chunk.count - 1) // size
                filled[slots.tables[chunk.row, first + 1 : last + 1]] = 0

    def _guesses(self, asking: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
        """By row, as many tokens as are asked for or fewer."""
        slots, left = self._slots, CATCH_UP
        guesses: dict[int, list[int]] = {}
        wanted = {chunk.row: chunk.num_drafts for chunk in asking}
        spans: list[Chunk] = []
        for row in wanted:
            known = int(slots.known[row])
            start = self._start(row, known)
            if not slots.room[row] or known + wanted[row] > min(self._max_len, int(slots.room[row])) or left <= 0:
                continue
            spans.append(Chunk(row, start, min(known - start, left), Samples.TOKEN))
            left -= known - start
        while spans:
            found = self._next(spans)
            following: list[Chunk] = []
            for span in spans:
                row, end, token = span.row, span.start + span.count, found.get(span.row, -1)
                if end < slots.known[row] or span.count > MOST_BEHIND or token < 0:
                    continue
                mine = guesses.setdefault(row, [])
                mine.append(token)
                slots.tokens[row, end] = token
                if len(mine) < wanted[row] and token not in slots.stop_ids[row]:
                    following.append(Chunk(row, end, 1, Samples.TOKEN))
            spans = following
        return {row: tuple(tokens) for row, tokens in guesses.items()}

    def _start(self, row: int, known: int) -> int:
        """The first token of the row whose KV is missing here; at least its last one is computed."""
        size = self._slots.block_size
        filled = self._filled[Tier.DEVICE][self._slots.tables[row, : -(-known // size)]]
        short: NDArray[np.intp] = np.flatnonzero(filled < size)
        start = known if not len(short) else int(short[0]) * size + int(filled[short[0]])
        return min(start, known - 1)

    def _next(self, spans: Sequence[Chunk]) -> dict[int, int]:
        """Compute these; the token behind each as its row would draw it from the draft model's logits."""
        slots, size = self._slots, self._slots.block_size
        ends = np.cumsum([span.count for span in spans])
        batch: ForwardBatch = batch_of(slots, spans, [int(end) - 1 for end in ends])
        rows: Ints = np.array([span.row for span in spans], np.int64)
        positions: Ints = np.array([span.start + span.count for span in spans], np.int64)
        if slots.all_plain(rows, np.maximum(positions, slots.known[rows])):  # a span that catches up is not sampled
            tokens = self._model.pick(batch, self._kv.data)
            failed: set[int] = set()
        else:
            drawn = sample(self._model.forward(batch, self._kv.data), np.arange(len(rows)), rows, positions, slots)
            tokens, failed = drawn.tokens, set(drawn.failed)
        filled = self._filled[Tier.DEVICE]
        for span in spans:
            first, last = span.start // size, (span.start + span.count - 1) // size
            filled[slots.tables[span.row, first:last]] = size
            filled[slots.tables[span.row, last]] = (span.start + span.count - 1) % size + 1
        return {int(row): int(token) for row, token in zip(rows, tokens, strict=True) if row not in failed}


def _with(chunk: Chunk, drafts: tuple[int, ...]) -> Chunk:
    """The chunk with these draft tokens, in place of those it asks for."""
    count = chunk.count - chunk.num_drafts + len(drafts)
    samples = Samples.VERIFY if drafts else Samples.TOKEN
    return Chunk(chunk.row, chunk.start, count, samples, chunk.source, drafts)
