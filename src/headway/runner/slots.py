"""One row per admitted request for its whole life: its tokens, its block table, its computed tokens.

    tokens   [ t0 t1 t2 t3 t4 t5 ]          known  = 6: tokens that exist
    cells    [ k0 k1 k2 k3 k4 ]             length = 5: tokens whose KV is computed
                                ^ t5 is the newest token: sampled here, not computed yet, never sent back

What a decode step reads is kept in columns, so that no Python object is made per row and step. The slots belong
to the executor's worker thread. They know no model and take no decision: a row changes when a plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.errors import RowFailed
from headway.models.adapter import Adapter, AdapterRows
from headway.runner.adapters import AdapterStore
from headway.runner.dry import breaker_mask
from headway.values.params import SamplingParams
from headway.values.plan import Grow, Join

_Change = TypeVar("_Change")


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What never changes about the request in a row."""

    id: int
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    is_breaker: NDArray[np.bool_] = field(default_factory=lambda: breaker_mask((), 0))  # [vocab]; of those with DRY


class Slots:
    """room[row] is 0 unless the row is joined and sound; tokens below room[row] lie in blocks of its table."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        max_len: int,
        vocab_size: int,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._max_len = max_len
        self._max_blocks = -(-max_len // block_size)
        self.tokens = np.zeros((num_rows, max_len + 1), np.int32)  # a full row still samples one token more
        self.tables = np.zeros((num_rows, self._max_blocks), np.int32)
        self.length = np.zeros(num_rows, np.int64)
        self.known = np.zeros(num_rows, np.int64)
        self.room = np.zeros(num_rows, np.int64)
        self.is_plain = np.zeros(num_rows, np.bool_)  # greedy; nothing but a mask changes its logits
        self.needs_mask = np.zeros(num_rows, np.bool_)  # what it may sample follows a grammar
        self.stops_from = np.zeros(num_rows, np.int64)  # first token index at which its stop set is allowed
        self.stop_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self._requests: list[RowRequest | None] = [None] * num_rows
        self.adapters = adapters  # None: no row may name one
        self._adapter_of: dict[int, Adapter] = {}  # by row, of those that have one
        self._table_len = np.zeros(num_rows, np.int64)
        self._broken: dict[int, str] = {}
        self.num_changes = 0  # grows whenever a row's table may have changed

    def join(self, join: Join) -> None:
        """Give the row to a request. It replaces a request that has not left yet."""
        row = self._row(join.row)
        self.leave(row)
        params = join.params
        breakers = breaker_mask(params.dry_breakers, self.vocab_size if params.dry_multiplier else 0)
        request = RowRequest(join.id, join.num_prompt, params, join.seed, join.stop_ids, breakers)
        tokens = self._token_ids(join.tokens)
        blocks = self._block_ids(join.table)
        if len(tokens) > self._max_len:
            raise RowFailed(f"request {join.id} has {len(tokens)} tokens; a row has room for {self._max_len}")
        if not 0 <= join.num_prompt <= len(tokens):
            raise RowFailed(f"request {join.id} calls {join.num_prompt} of its {len(tokens)} tokens the prompt")
        if not 0 <= join.start <= min(len(tokens), len(blocks) * self.block_size):
            raise RowFailed(
                f"request {join.id} starts at token {join.start}, with {len(tokens)} tokens and {len(blocks)} blocks"
            )
        if join.adapter and self.adapters is None:
            raise RowFailed(f"request {join.id} asks for adapter {join.adapter!r}; this executor runs none")
        if join.adapter and self.adapters is not None:
            self._adapter_of[row] = self.adapters.of(join.adapter)
        self._token_ids(list(join.params.logit_bias))
        self.tokens[row, : len(tokens)] = tokens
        self.tables[row, : len(blocks)] = blocks
        self.tables[row, len(blocks) :] = 0
        self.length[row] = join.start
        self.known[row] = len(tokens)
        self.is_plain[row] = _is_plain(join.params)
        self.needs_mask[row] = bool(join.params.grammar)
        self.stops_from[row] = join.num_prompt + join.params.min_tokens
        self.stop_ids[row] = join.stop_ids
        self._requests[row] = request
        self._cover(row, len(blocks))

    def leave(self, row: int) -> None:
        """Empty a row; an empty one may be emptied again."""
        row = self._row(row)
        self.num_changes += 1
        self._requests[row] = None
        self._adapter_of.pop(row, None)
        self.stop_ids[row] = frozenset()
        self.room[row] = self.known[row] = self.length[row] = 0
        self._broken.pop(row, None)

    def grow(self, grow: Grow) -> None:
        """Set entries of a row's table: behind its end, or in place of blocks that were copied."""
        row, index, blocks = grow.row, grow.index, grow.blocks
        self.request(row)
        end = index + len(blocks)
        if not 0 <= index <= self._table_len[row] or end > self._max_blocks:
            raise RowFailed(
                f"row {row}: table entries {index} to {end} are set; it has {self._table_len[row]} "
                f"and room for {self._max_blocks}"
            )
        self.num_changes += 1
        self.tables[row, index:end] = self._block_ids(blocks)
        self._cover(row, max(end, int(self._table_len[row])))

    def advance(self, rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Each row has a new newest token at its position; every token before it is computed."""
        self.tokens[rows, positions] = tokens
        self.length[rows] = positions
        self.known[rows] = positions + 1

    def extend(self, row: int, base: int, tokens: Sequence[int]) -> None:
        """The row goes on with these from `base` on; every token before the last of them is computed."""
        end = base + len(tokens)
        self.tokens[row, base:end] = tokens
        self.length[row], self.known[row] = end - 1, end

    def widest(self, rows: NDArray[np.int64]) -> int:
        """Entries of the longest table among these rows."""
        return int(self._table_len[rows].max())

    def adapters_of(self, rows: NDArray[np.int64]) -> AdapterRows | None:
        """Which adapter each of these rows has; None: none of them has one."""
        if not self._adapter_of:
            return None
        places: dict[Adapter, int] = {}
        found = [self._adapter_of.get(row) for row in rows.tolist()]
        of = [-1 if adapter is None else places.setdefault(adapter, len(places)) for adapter in found]
        return AdapterRows(np.array(of, np.int32), tuple(places)) if places else None

    def all_plain(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """Whether the token at positions[i] of rows[i] is, for every i, the largest logit's that its mask allows."""
        return bool((self.is_plain[rows] & (positions >= self.stops_from[rows])).all())

    def fail(self, row: int, reason: str) -> None:
        """Take a row out of service until it is joined anew; the first reason stays."""
        if 0 <= row < self.num_rows:
            self._broken.setdefault(row, reason)
            self.room[row] = 0

    def each(
        self,
        change: Callable[[_Change], None],
        values: Iterable[_Change],
        row_of: Callable[[_Change], int],
        failed: dict[int, str],
    ) -> None:
        """Apply a change for each value; a broken join or growth fails that row alone."""
        for value in values:
            try:
                change(value)
            except Exception as error:
                reason = str(error) if isinstance(error, RowFailed) else repr(error)
                self.set_aside({row_of(value): reason}, failed)

    def set_aside(self, reasons: Mapping[int, str], failed: dict[int, str]) -> None:
        """Fail rows, and note the first reason of each in `failed`."""
        for row, reason in reasons.items():
            failed.setdefault(row, reason)
            self.fail(row, reason)

    def request(self, row: int) -> RowRequest:
        """The request of a sound row."""
        request = self._requests[self._row(row)]
        if row in self._broken:
            raise RowFailed(self._broken[row])
        if request is None:
            raise RowFailed(f"row {row} is in the plan and no request has joined it")
        return request

    def check_tokens(self, tokens: tuple[int, ...]) -> None:
        """Refuse ids the model has no embedding for."""
        self._token_ids(tokens)

    def _cover(self, row: int, num_blocks: int) -> None:
        self._table_len[row] = num_blocks
        self.room[row] = min(num_blocks * self.block_size, self._max_len)

    def _row(self, row: int) -> int:
        # Checked because a negative index would quietly name another request's row.
        if not 0 <= row < self.num_rows:
            raise RowFailed(f"row {row} does not exist; rows are 0 to {self.num_rows - 1}")
        return row

    def _token_ids(self, tokens: object) -> NDArray[np.int64]:
        ids = _ids(tokens)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise RowFailed(f"token ids {ids.min()} to {ids.max()} were given; allowed: 0 to {self.vocab_size - 1}")
        return ids

    def _is_block(self, id: object) -> bool:
        return type(id) is int and 0 <= id < self.num_blocks

    def _block_ids(self, blocks: object) -> NDArray[np.int64] | tuple[int, ...]:
        if isinstance(blocks, tuple) and len(blocks) == 1 and self._is_block(blocks[0]):
            return blocks  # the usual growth: an array of one costs more than everything else about it
        ids = _ids(blocks)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_blocks):
            raise RowFailed(f"block ids {ids.min()} to {ids.max()} were given; allowed: 0 to {self.num_blocks - 1}")
        if ids.size > self._max_blocks:
            raise RowFailed(f"a table of {ids.size} blocks was given; a row has room for {self._max_blocks}")
        return ids


def _ids(values: object) -> NDArray[np.int64]:
    try:
        return np.asarray(values, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise RowFailed(f"ids that are not 64-bit integers were given: {error}") from error


def _is_plain(params: SamplingParams) -> bool:
    is_free = not (params.logit_bias or has_penalties(params))
    return params.is_greedy and params.logprobs is None and is_free


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change the logits."""
    is_plain = params.repetition_penalty == 1.0 and not (params.presence_penalty or params.frequency_penalty)
    return bool(params.dry_multiplier) or not is_plain
