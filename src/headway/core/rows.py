"""The rows of the batch: which request is in which row, and in which step a decoding row needs attention.

A decoding row is touched only when it needs a block or ends. Both steps are known when it begins to decode, so they are
in calendars keyed by step, and no step visits all rows. A paused row is taken out of the calendars and entered again,
later by the steps it was paused, when it resumes.

    step         s            s+1   …   s+1+k            s+left-1
    position     last chunk   base      base+k = 16·m    base+left-2
                 samples #1   check     needs a block    samples the last token by length
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import NamedTuple

from headway.core.request import Request
from headway.core.waits import add as add_wait
from headway.values.states import WaitReason


class Calendar:
    """Rows by the step in which something happens to them; a row has one date at most."""

    def __init__(self) -> None:
        self._date: dict[int, int] = {}
        self._due: defaultdict[int, dict[int, None]] = defaultdict(dict)

    def add(self, step: int, row: int) -> None:
        if row in self._date:
            self.strike(row)
        self._date[row] = step
        self._due[step][row] = None

    def strike(self, row: int) -> int:
        """Forget the row's date, and return it; -1 if it has none."""
        step = self._date.pop(row, -1)
        if step >= 0:
            del self._due[step][row]
            if not self._due[step]:
                del self._due[step]
        return step

    def take(self, step: int) -> list[int]:
        """The rows of this step, in the order in which they were noted; their dates are struck."""
        return [row for row in self._due.pop(step, ()) if self._date.pop(row) == step]


class Columns(NamedTuple):
    """The decoding rows, their requests' ids, and where each one's token goes: parallel."""

    decode: array[int]
    ids: list[int]
    sinks: list[Callable[[int], None]]


class Rows:
    """A row has at most one request; it decodes, is paused, prefills, or waits for its last result."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.req: list[Request | None] = [None] * num_rows
        self.joined = [0] * num_rows  # first plan of the row's request
        self.ends = Calendar()
        self.crossings = Calendar()
        self.prefilling: dict[int, None] = {}  # rows that still have known tokens to compute, oldest first
        self._place: dict[int, int] = {}  # decoding row -> its index in the columns
        # Row -> its request, the step of its pause, the step in which it would end, the time of its pause.
        self.paused: dict[int, tuple[Request, int, int, float]] = {}
        self._starting: dict[int, Request] = {}  # by row: decode from the next step on
        self._free = list(range(num_rows - 1, -1, -1))
        self._base = [-1] * num_rows  # position of its first decode step; -1 before it decodes
        self._base_step = [0] * num_rows
        self._block_size = block_size
        self._columns = Columns(array("i"), [], [])
        self._bases = 0  # of all decoding rows, each less the step in which it began
        self._is_handed_out = False  # a plan has the columns: copied before the next change

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.req) - len(self._free)

    @property
    def num_decoding(self) -> int:
        return len(self._place)

    def is_decoding(self, row: int) -> bool:
        return row in self._place

    def running(self) -> list[Request]:
        return [req for req in self.req if req is not None]

    def assign(self, req: Request, step: int) -> int:
        row = req.row = self._free.pop()
        self.req[row], self.joined[row] = req, step
        return row

    def vacate(self, req: Request, step: int, now: float) -> None:
        row = req.row
        self.req[row] = None
        self.prefilling.pop(row, None)
        if row in self.paused:
            self._end_pause(row, step, now)
        self.ends.strike(row)
        self.crossings.strike(row)
        self.retire(row)
        self._base[row] = -1
        self._free.append(row)
        req.row = -1
        req.epoch += 1

    def retire(self, row: int) -> None:
        """Decode no further; the row keeps its request. The last row of the columns takes its place."""
        index = self._place.pop(row, None)
        if index is None:
            self._starting.pop(row, None)
            return
        self._bases -= self._base[row] - self._base_step[row]
        decode, ids, sinks = self._own_columns()
        last = decode.pop()
        id, sink = ids.pop(), sinks.pop()
        if last != row:
            decode[index], ids[index], sinks[index] = last, id, sink
            self._place[last] = index

    def begin_decode(self, req: Request, step: int, left: int) -> None:
        """All known tokens are scheduled: from `step` on the row decodes, until it has `left` tokens more."""
        row = req.row
        self.prefilling.pop(row, None)
        self.ends.add(step + left - 1, row)
        self._base[row] = req.num_scheduled
        self._base_step[row] = step
        if left > 0:
            self._starting[row] = req
            self.crossings.add(step, row)

    def await_results(self, req: Request, step: int) -> bool:
        """From `step` on a decoding row is planned when its results are in. False: it has no two tokens to decode."""
        row, end = req.row, self.ends.strike(req.row)
        if end <= step or not (row in self._place or row in self._starting):
            if end >= 0:
                self.ends.add(end, row)
            return False
        self.crossings.strike(row)
        self.retire(row)
        self.prefilling[row] = None
        req.num_scheduled = self._base[row] + step - self._base_step[row]
        req.needs_feedback = True
        return True

    def decode_ahead(self, req: Request, step: int) -> None:
        """All results of such a row are in; from `step` on it decodes again."""
        req.needs_feedback, req.num_computed = False, req.num_scheduled
        self.begin_decode(req, step, req.params.max_tokens - req.num_output)

    def advance(self) -> None:
        """A new step begins: rows that sampled their first token in the last one decode from now on."""
        for req in self._starting.values():
            self._place_last(req)
        self._starting.clear()

    def wanting(self) -> list[Request]:
        """Requests with known tokens that are not scheduled; not those that wait for a result they need."""
        prefilling = (self.req[row] for row in self.prefilling)
        return [req for req in prefilling if req is not None and len(req.tokens) > req.num_scheduled]

    @property
    def num_wanted(self) -> int:
        """Known tokens that are not scheduled."""
        return sum(len(req.tokens) - req.num_scheduled for req in self.wanting())

    def pause(self, requests: Collection[Request], step: int, now: float) -> None:
        """Pause these of the decoding requests from this step on, except the last decoding row; resume all others."""
        staying = {req.row for req in requests} if self._place else set()
        for row in [row for row in self.paused if row not in staying]:
            req, since, end, _ = self._end_pause(row, step, now)
            self._base_step[row] += step - since
            self.ends.add(end + step - since, row)
            self.crossings.add(step, row)
            self._place_last(req)
        for req in requests:
            if self.num_decoding > 1:
                self.pause_row(req, step, now)

    def pause_row(self, req: Request, step: int, now: float) -> None:
        """Pause the row until the next call of `pause`, though it be the last, if it decodes."""
        if self.is_decoding(req.row):
            self.paused[req.row] = req, step, self.ends.strike(req.row), now
            self.crossings.strike(req.row)
            self.retire(req.row)

    def _end_pause(self, row: int, step: int, now: float) -> tuple[Request, int, int, float]:
        req, since, _, paused_at = pause = self.paused.pop(row)
        add_wait(req, WaitReason.PAUSED, step - since, now - paused_at)
        return pause

    def _place_last(self, req: Request) -> None:
        decode, ids, sinks = self._own_columns()
        self._place[req.row] = len(decode)
        self._bases += self._base[req.row] - self._base_step[req.row]
        decode.append(req.row)
        ids.append(req.id)
        sinks.append(req.tokens.append)

    def take_crossings(self, step: int) -> list[tuple[Request, int]]:
        """The decoding rows that may need a block in `step`: their requests, and the position that each computes."""
        req, base, begun, is_decoding = self.req, self._base, self._base_step, self._place.__contains__
        rows = filter(is_decoding, self.crossings.take(step))  # some have sampled their last token
        return [(found, base[row] + step - begun[row]) for row in rows if (found := req[row]) is not None]

    def context(self, step: int) -> int:
        """Tokens whose KV the decoding rows read in `step`, beside the one that each computes."""
        return self._bases + len(self._place) * step

    def load(self, step: int) -> tuple[int, int]:
        """How many rows decode or are paused, and the tokens whose KV a step with all of them reads."""
        context = self.context(step)
        for row, (_, since, *_) in self.paused.items():
            context += self._base[row] + since - self._base_step[row]
        return len(self._place) + len(self.paused), context

    def next_crossing(self, row: int, step: int, position: int) -> None:
        """Note when the row, which has the block for this position of `step`, enters its next one."""
        self.crossings.add(step + self._block_size - position % self._block_size, row)

    def num_computed(self, req: Request) -> int:
        """Tokens whose KV is present: of a decoding row, all known tokens but the last."""
        is_decoding = req.row >= 0 and req.num_computed == self._base[req.row]
        return len(req.tokens) - 1 if is_decoding else req.num_computed

    def columns(self) -> Columns:
        """The decode rows with their requests' ids and token lists; the same object until a row joins or leaves."""
        self._is_handed_out = True
        return self._columns

    def _own_columns(self) -> Columns:
        if self._is_handed_out:
            # Three block copies, 3 us for 1,000 rows; a Python object per row and step would cost 1 us each.
            decode, ids, sinks = self._columns
            self._columns = Columns(decode[:], ids[:], sinks[:])
            self._is_handed_out = False
        return self._columns
