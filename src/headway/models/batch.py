"""`ForwardBatch`: one step as the decoder sees it, with every request as rows of tensors.

It knows block tables and positions; requests, sampling and scheduling stay outside.

    row 0 decodes 1 token, row 1 prefills 3          block_size 4
    tokens       [ a | b c d ]                       query_start [0, 1, 4]
    positions    [ 6 | 0 1 2 ]                       context     [7, 3]
    row_of       [ 0 | 1 1 1 ]                       tables      [[9, 5], [2, 0]]   (the 0 is padding)
    slot_map     [22 | 8 9 10]                       sample_index [0, 3]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of one row are adjacent and ascending; no two tokens share a cell of slot_map."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: place in the request, counted from 0
    slot_map: Tensor  # [T] int64: flat cell (block * block_size + offset) each new key goes to
    row_of: Tensor  # [T] int32: index into tables
    tables: Tensor  # [R, W] int32: block ids, padded with 0; block 0 may be live, so padding is masked, never read
    query_start: Tensor  # [R + 1] int32: row r owns tokens query_start[r] : query_start[r + 1]
    context: Tensor  # [R] int32: tokens visible to the row after this step
    sample_index: Tensor  # [S] int64: tokens whose hidden state goes to the head
    block_size: int
