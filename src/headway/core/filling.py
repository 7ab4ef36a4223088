"""Chunks: how a step's room is shared out among the prompts under way.

The shortest rest goes first, since it delays the others least; every fourth chunk goes to the oldest, so that a long
prompt under a stream of short ones gets on too. More urgent classes come before less urgent ones throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.flight import Draft
from headway.core.lifecycle import Lifecycle
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.seating import Seating
from headway.values.limits import PrefillOrder
from headway.values.plan import Chunk, Samples
from headway.values.work import Work

OLDEST_EVERY = 4  # chunks


class Filling:
    """Plans known tokens; a row whose last known token is planned decodes from the next step on."""

    def __init__(self, life: Lifecycle, seating: Seating, policy: Policy) -> None:
        self._life = life
        self._rows = life.rows
        self._seating = seating
        self._policy = policy
        self._turn = 0  # counts chunks, to give the oldest its share

    def wanting(self) -> list[Request]:
        """Those with known tokens that are not planned; not those who wait for a result they need."""
        filling = (self._rows.req[row] for row in self._rows.filling)
        return [req for req in filling if req is not None and len(req.tokens) > req.planned]

    @property
    def num_wanted(self) -> int:
        """Known tokens that are not planned."""
        return sum(len(req.tokens) - req.planned for req in self.wanting())

    def fill(self, room: int, draft: Draft) -> None:
        """Share out `room` tokens, as far as the pacer lets each have some beside those before it."""
        pacer = self._seating.pacer
        decoding = self._rows.num_decoding, self._rows.context(self._life.step)
        for req in self._in_turn(self.wanting() if room > 0 else []):
            if req.row < 0:  # preempted for a row before it
                continue
            paced = room if pacer is None else pacer.tokens(draft.work(*decoding), req.planned, self._policy.gap())
            count = self._chunk_size(req, min(room, paced))
            if count > 0 and self._seating.make_room(req, req.planned, req.planned + count, draft):
                self._add_chunk(req, count, draft)
                room -= count
                if room <= 0:
                    break

    def room(self) -> int:
        """Prompt tokens that this step may carry, if the first of them are those of whose turn it probably is."""
        rows, pacer = self._rows, self._seating.pacer
        room = self._seating.limits.tokens - rows.num_decoding
        if pacer is None:
            return room
        work = Work(decode=rows.num_decoding, context=rows.context(self._life.step))
        first = min(self.wanting(), key=self._order, default=None)
        return min(room, max(1, pacer.tokens(work, 0 if first is None else first.planned, self._policy.gap())))

    def _order(self, req: Request) -> tuple[int, float, int]:
        rank, joined = self._policy.rank(req), self._rows.joined[req.row]
        if self._seating.limits.prefill is PrefillOrder.ARRIVAL:
            return rank, joined, req.id
        return rank, len(req.tokens) - req.planned, joined

    def _in_turn(self, wanting: list[Request]) -> Iterator[Request]:
        """By `_order`, but every fourth is the oldest of the most urgent class that is left."""
        rank, joined = self._policy.rank, self._rows.joined
        by_order = sorted(wanting, key=self._order)
        by_age = sorted(wanting, key=lambda req: (rank(req), joined[req.row], req.arrival, req.id))
        orders, taken = (iter(by_order), iter(by_age)), set[int]()
        for _ in wanting:
            self._turn += 1
            order = orders[self._turn % OLDEST_EVERY == 0]
            req = next(req for req in order if req.id not in taken)
            taken.add(req.id)
            yield req

    def _chunk_size(self, req: Request, room: int) -> int:
        wanted = len(req.tokens) - req.planned
        if wanted == 1 and req.draft:
            return min(1 + len(req.draft), req.params.max_tokens - req.num_output, room)
        return min(wanted, room, self._seating.limits.chunk or wanted)

    def _add_chunk(self, req: Request, count: int, draft: Draft) -> None:
        start, end = req.planned, min(req.planned + count, len(req.tokens))
        drafts = req.draft[: start + count - end]
        samples = Samples.NONE if end < len(req.tokens) else Samples.ALL if drafts else Samples.TOKEN
        draft.add_chunk(Chunk(req.row, start, count, samples, drafts=drafts), req)
        req.planned = end
        if samples:
            if not req.needs_feedback:
                self._rows.begin_decode(req, self._life.step)
            if req.num_output == 0:
                self._fork(req, draft)

    def _fork(self, leader: Request, draft: Draft) -> None:
        """Seat those who share this prompt: they sample from its last position and compute nothing."""
        life = self._life
        for req in life.line.take_followers(leader.id):
            has_seat = self._seating.num_allowed(life.now, self._seating.num_seats)
            if not has_seat or not life.ledger.fork(leader, req, leader.num_prompt, self._seating.reserves):
                life.line.push(req, None)
                continue
            req.num_cached = leader.num_cached
            req.planned = req.num_prompt
            self._seating.seat(req, draft, is_forked=True)
            draft.add_chunk(Chunk(req.row, req.planned, 0, Samples.TOKEN, source=leader.row), req)
            if not req.needs_feedback:
                self._rows.begin_decode(req, life.step)
