"""What a step samples, and draft tokens in it: how many of a chunk's are computed, which of them were right.

A row with drafts waits for its results. Each position is sampled by its own uniform number, so the tokens up to the
first wrong guess are those that single steps would have given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.values.plan import Chunk, Samples


class SampledEntry(NamedTuple):
    """An entry that is sampled behind the decode rows."""

    token: int  # of the step: its logits
    row: int
    place: int  # the position of what is sampled


class DraftEntries(NamedTuple):
    """Entries first to first + len(drafts) of a step decide the tokens of a row from position `base` on."""

    first: int
    row: int
    base: int
    drafts: tuple[int, ...]


def shortened(chunks: Sequence[Chunk], room: int, plain: Collection[int]) -> list[Chunk]:
    """The chunks with at most `room` draft tokens in all, and none in rows of `plain`: fewer change speed alone."""
    found = []
    for chunk in chunks:
        left = 0 if chunk.row in plain else min(room, len(chunk.drafts))
        if left < len(chunk.drafts):
            count, samples = chunk.count - len(chunk.drafts) + left, Samples.VERIFY if left else Samples.TOKEN
            chunk = replace(chunk, count=count, samples=samples, drafts=chunk.drafts[:left])
        room -= left
        found.append(chunk)
    return found


def samples_of(decode: NDArray[np.int64], chunks: Sequence[Chunk], failed: dict[int, str]) -> list[SampledEntry]:
    """Those of every chunk that samples; one that computes nothing reads its source's last token."""
    last: dict[int, int] = {}
    token = len(decode)
    for chunk in chunks:
        token += chunk.count
        if chunk.count:
            last[chunk.row] = token - 1
    if any(not chunk.count for chunk in chunks):
        last = {**{row: i for i, row in enumerate(decode.tolist())}, **last}
    found = []
    for chunk in chunks:
        if not chunk.samples:
            continue
        source, end = chunk.row if chunk.count else chunk.source, chunk.start + chunk.count
        if source in last:
            backs = range(len(chunk.drafts), -1, -1)
            found += [SampledEntry(last[source] - back, chunk.row, end - back) for back in backs]
        else:
            failed[chunk.row] = f"row {chunk.row} samples from row {chunk.source}, which computes nothing in this plan"
    return found


def verifies_of(num_decode: int, samples: Sequence[SampledEntry], chunks: Sequence[Chunk]) -> list[DraftEntries]:
    """Where the entries of each chunk with drafts are."""
    firsts: dict[int, int] = {}
    for i, sample in enumerate(samples):
        firsts.setdefault(sample.row, num_decode + i)
    return [
        DraftEntries(firsts[chunk.row], chunk.row, chunk.start + chunk.count - len(chunk.drafts), chunk.drafts)
        for chunk in chunks
        if chunk.drafts and chunk.row in firsts
    ]


def count_right(words: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the sampled words count: a word that ends the row or fails it is no guess either."""
    for num, (word, draft) in enumerate(zip(words, drafts, strict=False), 1):
        if word != draft:
            return num
    return len(drafts) + 1
