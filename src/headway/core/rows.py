"""The seats: which request sits in which row, and when something happens to a row that merely decodes.

A decoding row is touched only when it needs a block or ends. Both moments are known when it begins to decode,
so they stand in calendars keyed by step; nothing runs over all rows in between.

    step         s            s+1   …   s+1+k            s+left-1
    cells        last chunk   base      base+k = 16·m    base+left-2
                 samples #1   check     needs a block    samples the last token by length
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from headway.core.request import Request


class Calendar:
    """Rows by the step in which something happens to them; entries of a row that was vacated since are dead."""

    def __init__(self, stamps: list[int]) -> None:
        self._stamps = stamps
        self._due: dict[int, list[tuple[int, int]]] = {}

    def add(self, step: int, row: int) -> None:
        entry = (row, self._stamps[row])
        due = self._due.get(step)
        if due is None:
            self._due[step] = [entry]
        else:
            due.append(entry)

    def take(self, step: int) -> list[int]:
        """The living rows of this step; it is struck from the calendar."""
        stamps = self._stamps
        return [row for row, stamp in self._due.pop(step, ()) if stamps[row] == stamp]


class Rows:
    """A row has at most one request; it is decoding, filling, or waiting for its last result."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.req: list[Request | None] = [None] * num_rows
        self.stamp = [0] * num_rows  # grows when a row is vacated
        self.joined = [0] * num_rows  # first plan of the row's request
        self.ends = Calendar(self.stamp)
        self.crossings = Calendar(self.stamp)
        self.filling: dict[int, None] = {}  # rows that still have known tokens to compute, oldest first
        self._decoding: dict[int, Request] = {}
        self._starting: list[tuple[int, int]] = []  # (row, stamp): decode from the next step on
        self._free = list(range(num_rows - 1, -1, -1))
        self._base = [-1] * num_rows  # cell that the row writes in its first decode step; -1 before it decodes
        self._base_step = [0] * num_rows
        self._block_size = block_size
        self._is_stale = True
        self._decode: array[int] = array("i")
        self._ids: list[int] = []
        self._sinks: list[Callable[[int], None]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.req) - len(self._free)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def is_decoding(self, row: int) -> bool:
        return row in self._decoding

    def running(self) -> list[Request]:
        return [req for req in self.req if req is not None]

    def seat(self, req: Request, step: int) -> int:
        row = self._free.pop()
        self.req[row] = req
        self.joined[row] = step
        req.row = row
        return row

    def vacate(self, req: Request) -> None:
        row = req.row
        self.req[row] = None
        self.stamp[row] += 1
        self.filling.pop(row, None)
        self.retire(row)
        self._base[row] = -1
        self._free.append(row)
        req.row = -1
        req.epoch += 1

    def retire(self, row: int) -> None:
        """Decode no further; the row keeps its request."""
        if row in self._decoding:
            del self._decoding[row]
            self._is_stale = True

    def begin_decode(self, req: Request, step: int) -> None:
        """The plan of `step` samples a token for this row; from the next step on it decodes, until it ends."""
        row, left = req.row, req.params.max_tokens - req.num_output
        self.filling.pop(row, None)
        self.ends.add(step + left - 1, row)
        self._base[row] = req.planned
        self._base_step[row] = step + 1
        if left > 1:
            self._starting.append((row, self.stamp[row]))
            self.crossings.add(step + 1, row)

    def advance(self) -> None:
        """A new step begins: rows that sampled their first token in the last one decode from now on."""
        for row, stamp in self._starting:
            req = self.req[row]
            if req is not None and self.stamp[row] == stamp:
                self._decoding[row] = req
                self._is_stale = True
        self._starting.clear()

    def cell(self, row: int, step: int) -> int:
        """The cell that a decoding row writes in `step`."""
        return self._base[row] + step - self._base_step[row]

    def next_crossing(self, row: int, step: int) -> None:
        """Note when the row, whose cell of `step` is provided for, enters its next block."""
        self.crossings.add(step + self._block_size - self.cell(row, step) % self._block_size, row)

    def cells_of(self, req: Request) -> int:
        """Cells known to be present: a decoding row has one for every known token but the last."""
        return len(req.tokens) - 1 if req.computed == self._base[req.row] else req.computed

    def columns(self) -> tuple[array[int], tuple[list[int], list[Callable[[int], None]]]]:
        """The decode rows with their requests' ids and token lists; rebuilt only when membership changed."""
        if self._is_stale:
            # About 0.1 us per row, and only when somebody joined or left; a Python object per row and step: 1 us.
            self._decode = array("i", self._decoding)
            self._ids = [req.id for req in self._decoding.values()]
            self._sinks = [req.tokens.append for req in self._decoding.values()]
            self._is_stale = False
        return self._decode, (self._ids, self._sinks)
