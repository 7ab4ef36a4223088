"""`ForwardBatch`: one step as the decoder sees it, with every request as rows of arrays.

It knows block tables and positions; requests, sampling and scheduling stay outside.

    row 0 decodes 1 token, row 1 prefills 3          block_size 4
    tokens       [ a | b c d ]                       query_start [0, 1, 4]
    positions    [ 6 | 0 1 2 ]                       context     [7, 3]
    row_of       [ 0 | 1 1 1 ]                       tables      [[9, 5], [2, 0]]   (the 0 is padding)
    slot_map     [22 | 8 9 10]                       sample_index [0, 3]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.models.adapter import AdapterRows

Longs = NDArray[np.int64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of one row are adjacent and ascending; no two tokens share a cell of slot_map."""

    tokens: Longs  # [T]
    positions: Longs  # [T]: place in the request, counted from 0
    slot_map: Longs  # [T]: flat cell (block * block_size + offset) each new key goes to
    row_of: Ints  # [T]: index into tables
    tables: Ints  # [R, W]: block ids, padded with 0; block 0 may be live, so padding is masked, never read
    query_start: Ints  # [R + 1]: row r owns tokens query_start[r] : query_start[r + 1]
    context: Ints  # [R]: tokens visible to the row after this step
    sample_index: Longs  # [S]: tokens whose hidden state goes to the head
    block_size: int
    adapters: AdapterRows | None = None  # None: no row has one
