"""A `StepPlan` and the slots become a `ForwardBatch`, and the list of what its logits are for.

Decode rows come first, then the chunks that compute. Everything per token is one vectorised expression over
(row, position); the chunks alone are looked at one by one. A row that cannot run is left out with its reason.
It changes no slot except that it writes drafts behind the known tokens, where no other code reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.errors import RowFailed
from headway.models.batch import ForwardBatch
from headway.runner.slots import Slots
from headway.values.plan import Chunk, Samples, StepPlan

Ints = NDArray[np.int64]


class Verify(NamedTuple):
    """A row with drafts: logits[first + i] decide the token at index base + i, for i up to len(drafts)."""

    row: int
    base: int
    first: int
    drafts: tuple[int, ...]


@dataclass(slots=True)
class StepInputs:
    """`rows`, `positions` and `index` are parallel: the decode rows that run, then the chunks that yield one token."""

    batch: ForwardBatch | None  # None: nothing to compute
    rows: Ints  # [N]
    positions: Ints  # [N] index of the token that is sampled
    index: Ints  # [N] line of the logits it is sampled from
    verifies: list[Verify]
    computed: list[Chunk]  # every chunk that ran, sampling or not
    failed: dict[int, str]  # row -> reason


def build(plan: StepPlan, slots: Slots) -> StepInputs:
    """What the plan computes and samples, after its leaves, joins and grows are in the slots."""
    failed: dict[int, str] = {}
    decode = decode_rows(plan, slots, failed)
    chunks = [chunk for chunk in plan.chunks if can_run(chunk, slots, failed)]
    computing = [chunk for chunk in chunks if chunk.count]
    starts = slots.length[decode]
    lines, draws, verifies = _lines(decode, chunks, failed)
    batch = _batch(slots, decode, starts, computing, lines) if len(decode) or computing else None
    extra = np.array(draws, np.int64).reshape(len(draws), 3)
    return StepInputs(
        batch=batch,
        rows=np.concatenate((decode, extra[:, 0])),
        positions=np.concatenate((starts + 1, extra[:, 1])),
        index=np.concatenate((np.arange(len(decode)), extra[:, 2])),
        verifies=verifies,
        computed=computing,
        failed=failed,
    )


def decode_rows(plan: StepPlan, slots: Slots, failed: dict[int, str]) -> Ints:
    """The plan's decode rows that can run; the others are in `failed` with their reasons."""
    rows: Ints = np.array(plan.decode, np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= slots.num_rows):
        failed.update({row: _reason(row, slots) for row in rows.tolist() if not 0 <= row < slots.num_rows})
        rows = rows[(rows >= 0) & (rows < slots.num_rows)]
    starts = slots.length[rows]
    is_ready = (starts < slots.room[rows]) & (slots.known[rows] == starts + 1)
    if is_ready.all():
        return rows
    failed.update({row: _reason(row, slots) for row in rows[~is_ready].tolist()})
    ready: Ints = rows[is_ready]
    return ready


def _reason(row: int, slots: Slots) -> str:
    try:
        slots.request(row)
    except RowFailed as error:
        return str(error)
    length, known, room = slots.length[row], slots.known[row], slots.room[row]
    return f"row {row} cannot decode: {length} tokens are computed, {known} are known, its table covers {room}"


def can_run(chunk: Chunk, slots: Slots, failed: dict[int, str]) -> bool:
    """Whether a chunk fits its row, with its drafts written behind the row's tokens; if not, `failed` says why."""
    try:
        _check(chunk, slots)
    except RowFailed as error:
        failed[chunk.row] = str(error)
        return False
    if chunk.drafts:
        end = chunk.start + chunk.count
        slots.tokens[chunk.row, end - len(chunk.drafts) : end] = chunk.drafts
    return True


def _check(chunk: Chunk, slots: Slots) -> None:
    slots.request(chunk.row)
    length, known, room = (int(column[chunk.row]) for column in (slots.length, slots.known, slots.room))
    end, num_drafts = chunk.start + chunk.count, len(chunk.drafts)
    if chunk.num_drafts:
        raise RowFailed(f"row {chunk.row} needs draft tokens that the device holds; this executor has none")
    if chunk.start < 0 or chunk.count < 0 or end > room or end - num_drafts > known:
        raise RowFailed(
            f"row {chunk.row} cannot compute tokens {chunk.start} to {end} with {num_drafts} drafts: "
            f"{known} tokens are known, its table covers {room}"
        )
    if chunk.count and chunk.start > length:
        raise RowFailed(f"row {chunk.row} cannot start at token {chunk.start}: {length} tokens are computed")
    if not chunk.count and chunk.source < 0:
        raise RowFailed(f"row {chunk.row} computes nothing and names no row to sample from")
    if num_drafts and (chunk.samples != Samples.VERIFY or num_drafts >= chunk.count or end - num_drafts != known):
        raise RowFailed(
            f"row {chunk.row} has {num_drafts} drafts in a chunk of {chunk.count}; they must follow its "
            f"{known} known tokens, with at least the last of these, and sample at all positions"
        )
    slots.check_tokens(chunk.drafts)


def _lines(
    decode: Ints, chunks: Sequence[Chunk], failed: dict[int, str]
) -> tuple[list[int], list[tuple[int, int, int]], list[Verify]]:
    """Which tokens of the chunks go to the head, and what each line of logits is for.

    A line belongs to the last position of its row; a fork reads the line of its source. Decode rows have the
    first len(decode) lines. Draws are (row, position, line).
    """
    sources = {chunk.source for chunk in chunks if not chunk.count}
    line_of = {row: i for i, row in enumerate(decode.tolist()) if row in sources} if sources else {}
    tokens: list[int] = []
    draws: list[tuple[int, int, int]] = []
    verifies: list[Verify] = []
    after = len(decode)  # index behind the last token of the chunks so far
    for chunk in chunks:
        after += chunk.count
        if chunk.count and (chunk.samples or chunk.row in sources):
            tokens.extend(range(after - 1 - len(chunk.drafts), after))
            line_of[chunk.row] = len(decode) + len(tokens) - 1
    for chunk in chunks:
        line = line_of.get(chunk.row if chunk.count else chunk.source)
        end = chunk.start + chunk.count
        if not chunk.samples:
            continue
        if line is None:
            failed[chunk.row] = f"row {chunk.row} samples from row {chunk.source}, which computes nothing in this plan"
        elif chunk.drafts:
            base = end - len(chunk.drafts)
            verifies.append(Verify(chunk.row, base, line - len(chunk.drafts), chunk.drafts))
        else:
            draws.append((chunk.row, end, line))
    return tokens, draws, verifies


def batch_of(slots: Slots, chunks: Sequence[Chunk], lines: list[int]) -> ForwardBatch:
    """These chunks alone and without adapters, for a draft model; the tokens at `lines` go to the head."""
    none = np.zeros(0, np.int64)
    return replace(_batch(slots, none, none, chunks, lines), adapters=None)


def _batch(slots: Slots, decode: Ints, starts: Ints, chunks: Sequence[Chunk], lines: list[int]) -> ForwardBatch:
    num_decode = len(decode)
    if chunks:
        decode = np.concatenate((decode, [chunk.row for chunk in chunks]))
        starts = np.concatenate((starts, [chunk.start for chunk in chunks]))
    counts = np.ones(len(decode), np.int64)
    counts[num_decode:] = [chunk.count for chunk in chunks]
    query_start = np.zeros(len(decode) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    row_of = np.repeat(np.arange(len(decode)), counts)
    positions = np.arange(len(row_of)) + (starts - query_start[:-1])[row_of]
    slot_row = decode[row_of]
    blocks, offsets = np.divmod(positions, slots.block_size)
    slot_map = slots.tables[slot_row, blocks].astype(np.int64) * slots.block_size + offsets
    context = starts + counts
    width = -(-int(context.max()) // slots.block_size)
    adapters = slots.adapters_of(decode)
    sample_index = np.concatenate((np.arange(num_decode), np.array(lines, np.int64)))
    return ForwardBatch(
        tokens=slots.tokens[slot_row, positions].astype(np.int64),
        positions=positions,
        slot_map=slot_map,
        row_of=row_of.astype(np.int32),
        tables=slots.tables[decode, :width],
        query_start=query_start.astype(np.int32),
        context=context.astype(np.int32),
        sample_index=sample_index,
        block_size=slots.block_size,
        adapters=None if adapters is None else replace(adapters, of=adapters.of[row_of]),
    )
