"""The decision journal: why each request waited, each chunk and preemption, and what it cost. Bounded.

Events of the core say when and why; plans say which chunk ran in which step and how many blocks a row holds. A row that
merely decodes costs nothing per step: its share of device time is the difference of a running total, as waiting times
are. Of ended requests the last `MOST_ENDED` stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from headway.engine.client import RequestTiming
from headway.engine.explain import (
    DECODE,
    PAUSED,
    PREFILL,
    REPORT,
    STEP,
    ChunkNote,
    Explanation,
    Meanwhile,
    PreemptionNote,
    ReasonNote,
    WaitNote,
)
from headway.values.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Stepped
from headway.values.plan import StepPlan
from headway.values.states import Waited, WaitReason
from headway.values.work import Costs, Work

MOST_ENDED = 4096
MOST_STEPS = 8192
MOST_CHUNKS = 64  # of one request

_Reasons = Iterable[tuple[WaitReason, Waited]]


class _InFlight(NamedTuple):
    """A plan in flight: its id, its work, and the records and tokens of its chunks."""

    id: int
    work: Work
    chunks: list[tuple[_Record, int, bool]]


class _Before(NamedTuple):
    """A step: when it ended, its free blocks, and sums over all steps before it."""

    now: float = 0.0
    free_blocks: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class _Record:
    """One request; it is in exactly one of waiting, prefill, decode and ended."""

    __slots__ = (
        "at", "block_s", "blocks", "blocks_at", "chunks", "device_s", "finish", "first", "has_begun", "id",
        "is_resumed", "is_waiting", "mark", "num_cached", "num_chunks", "num_overtaken", "num_prompt", "parts",
        "predicted", "preemptions", "queued", "recomputed", "total", "waited", "waits",
    )  # fmt: skip

    def __init__(self, id: int, now: float, num_prompt: int) -> None:
        self.id, self.num_prompt = id, num_prompt
        self.queued = self.at = now  # `at`: when its present part began
        self.is_waiting = True
        self.is_resumed = self.has_begun = False  # another engine had it; it gave its first token
        self.parts: dict[str, float] = {}
        self.waited: dict[WaitReason, Waited] = {}  # what its closed waits account for
        self.waits: list[WaitNote] = []
        self.chunks: list[ChunkNote] = []
        self.num_chunks = 0
        self.preemptions: list[PreemptionNote] = []
        self.num_cached = self.num_overtaken = self.recomputed = 0
        self.first: float | None = None
        self.predicted: float | None = None
        self.finish: str | None = None
        self.total: float | None = None
        self.device_s = self.block_s = 0.0
        self.mark: float | None = None  # the running total when it began to decode
        self.blocks, self.blocks_at = 0, now

    @property
    def running_part(self) -> str:
        """What it is at while it is in a slot."""
        return PREFILL if self.first is None and not self.has_begun else DECODE

    def add(self, part: str, seconds: float) -> None:
        if seconds > 0.0:
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def hold(self, blocks: int, now: float) -> None:
        """It holds so many blocks from now on."""
        self.block_s += self.blocks * max(0.0, now - self.blocks_at)
        self.blocks, self.blocks_at = blocks, now

    def take_share(self, total: float) -> None:
        """It decodes no further: what it used since its mark is its own."""
        if self.mark is not None:
            self.device_s += total - self.mark
            self.mark = None

    def end_running(self, now: float, waited: Mapping[WaitReason, Waited]) -> None:
        """A stretch in a row is over."""
        paused = waited.get(WaitReason.PAUSED, _NOT).seconds - self.waited.get(WaitReason.PAUSED, _NOT).seconds
        self.add(self.running_part, now - self.at)
        self.take_pause(paused)
        self.at = now

    def take_pause(self, seconds: float) -> None:
        """So long it was paused in its row, perhaps before its first token came: its time in rows is less."""
        self.add(PAUSED, seconds)
        for part in (DECODE, PREFILL):
            taken = min(seconds, self.parts.get(part, 0.0))
            if taken > 0.0:
                self.parts[part] -= taken
                seconds -= taken

    def end_waiting(self, now: float, waited: Mapping[WaitReason, Waited]) -> None:
        """A stretch of waiting is over: what no reason accounts for, it waited for the step under way."""
        notes, rest = [], now - self.at
        for reason, after in waited.items():
            before = self.waited.get(reason, _NOT)
            steps, seconds = after.steps - before.steps, after.seconds - before.seconds
            if reason is WaitReason.PAUSED and seconds > 0.0:  # in the row that it had before
                self.take_pause(seconds)
            elif reason is not WaitReason.PAUSED and (steps > 0 or seconds > 0.0):
                notes.append(ReasonNote(reason.name.lower(), steps, seconds))
                rest -= seconds
        if rest > 0.0:
            notes.append(ReasonNote(STEP, 0, rest))
        for note in notes:
            self.add(note.reason, note.seconds)
        self.waits.append(WaitNote(self.at - self.queued, now - self.at, notes))
        if self.preemptions:
            last = self.preemptions[-1]
            self.preemptions[-1] = PreemptionNote(
                last.step, last.at_s, last.reason, last.tokens_lost, last.is_swapped, now - self.at
            )
        self.at = now


_NOT = Waited(0, 0.0)


class DecisionJournal:
    """A sink of the core's events that is also shown every plan. Memory is bounded by the constants above."""

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs or Costs()
        self._live: dict[int, _Record] = {}
        self._ended: OrderedDict[int, _Record] = OrderedDict()
        self._rows: dict[int, _Record] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._steps: deque[_Before] = deque(maxlen=MOST_STEPS)
        self._sums = _Before()  # over all steps so far
        self._admitted: deque[float] = deque(maxlen=MOST_STEPS)
        self._ending: list[_Record] = []  # ended by the step that is reported next, which is their own too
        self._per_row = 0.0  # device seconds of a row that has decoded in every step so far

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._stepped(event)
            for record in self._ending:  # those of a static batch are reported later
                record.take_share(self._per_row)
            self._ending.clear()
        elif isinstance(event, Queued):
            self._live[event.id] = _Record(event.id, event.now, event.num_prompt)
        elif isinstance(event, Admitted):
            self._was_admitted(self._live[event.id], event)
        elif isinstance(event, FirstToken):
            record = self._live[event.id]
            record.end_running(event.now, record.waited)
            record.first = event.now
        elif isinstance(event, Preempted):
            self._was_preempted(self._live[event.id], event)
        else:
            self._has_finished(self._live[event.id], event)

    def _was_admitted(self, record: _Record, event: Admitted) -> None:
        waited = _with(record.waited, event.waited)
        record.end_waiting(event.now, waited)
        record.waited, record.is_waiting = waited, False
        record.num_overtaken = event.num_overtaken
        if not event.is_resumed:
            record.num_cached = min(event.num_cached, record.num_prompt)
        self._admitted.append(event.now)

    def _was_preempted(self, record: _Record, event: Preempted) -> None:
        record.end_running(event.now, record.waited)
        record.take_share(self._per_row)
        record.hold(0, event.now)
        record.is_waiting = True
        at_s = event.now - record.queued
        record.preemptions.append(
            PreemptionNote(event.step, at_s, event.reason.value, event.num_lost, event.is_swapped)
        )

    def _has_finished(self, record: _Record, event: Finished) -> None:
        waited = _with(record.waited, event.waited)
        if record.is_waiting:
            record.end_waiting(event.now, waited)
        else:
            record.end_running(event.now, waited)
        record.waited, record.finish, record.recomputed = waited, event.reason, event.num_recomputed
        record.hold(0, event.now)
        self._ending.append(record)

    def scheduled(self, plan: StepPlan, now: float) -> None:
        """This plan is about to be submitted."""
        rows, live = self._rows, self._live
        for join in plan.joins:
            record = rows[join.row] = live[join.id]
            record.hold(len(join.table), now)
        for grow in plan.grows:
            record, count = rows[grow.row], grow.index + len(grow.blocks)
            if count > record.blocks:
                record.hold(count, now)
        chunks = []
        for chunk in plan.chunks:
            record = rows[chunk.row]
            record.num_chunks += 1
            if len(record.chunks) < MOST_CHUNKS:
                record.chunks.append(ChunkNote(plan.id, now - record.queued, chunk.start, chunk.count))
            chunks.append((record, max(1, chunk.count), bool(chunk.samples)))
        self._in_flight.append(_InFlight(plan.id, plan.work, chunks))

    def _stepped(self, event: Stepped) -> None:
        """Share the step's time out: chunks and decode rows by predicted cost, chunks by tokens, rows equally."""
        _, _, running, waiting, prompt_tokens, generated = self._sums
        self._steps.append(self._sums._replace(now=event.now, free_blocks=event.num_free_blocks))
        self._sums = _Before(
            running=running + event.num_running,
            waiting=waiting + event.num_waiting,
            prompt_tokens=prompt_tokens + event.num_computed - event.num_decode,
            generated_tokens=generated + event.num_generated,
        )
        while self._in_flight and self._in_flight[0].id < event.step:
            self._in_flight.popleft()
        if not self._in_flight or self._in_flight[0].id != event.step:
            return
        _, work, chunks = self._in_flight.popleft()
        by_chunks = event.elapsed * self._chunk_share(work)
        if work.decode:
            self._per_row += (event.elapsed - by_chunks) / work.decode
        num_tokens = sum(count for _, count, _ in chunks)
        for record, count, samples in chunks:
            record.device_s += by_chunks * count / num_tokens
            if samples and record.finish is None and not record.is_waiting:
                record.take_share(self._per_row)
                record.mark = self._per_row

    def _chunk_share(self, work: Work) -> float:
        if not work.chunks or not work.decode:
            return 1.0 if work.chunks else 0.0
        chunks = self._costs.step(work._replace(decode=0, context=0))
        decode = self._costs.step(work._replace(tokens=0, pairs=0, chunks=0))
        if chunks + decode <= 0.0:
            return work.tokens / (work.tokens + work.decode)
        return chunks / (chunks + decode)

    def resumed(self, id: int, *, has_begun: bool) -> None:
        """An engine that has ended had it first, and perhaps gave its first tokens."""
        record = self._live[id]
        record.is_resumed, record.has_begun = True, has_begun

    def predicted(self, id: int, seconds: float) -> None:
        """The TTFT that was predicted when it came."""
        self._live[id].predicted = seconds

    def ended(self, id: int, timing: RequestTiming) -> tuple[float, float]:
        """Its end is reported: device seconds and KV block-seconds in all. In a static batch it ended before that."""
        record = self._live.pop(id)
        record.take_share(self._per_row)
        record.add(REPORT, timing.total_s - (record.at - record.queued))
        record.total = timing.total_s
        self._ended[id] = record
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        return record.device_s, record.block_s

    def explain(self, id: int, now: float) -> Explanation | None:
        """What there is to say about a request that lives or ended lately; None if the journal does not have it."""
        record = self._live.get(id) or self._ended.get(id)
        if record is None:
            return None
        parts, total = dict(record.parts), record.total
        if total is None:
            total = now - record.queued
            part = "waiting" if record.is_waiting else record.running_part
            parts[part] = parts.get(part, 0.0) + now - record.at
        device = record.device_s + (0.0 if record.mark is None else self._per_row - record.mark)
        return Explanation(
            id=id,
            state="done" if record.total is not None else "waiting" if record.is_waiting else "running",
            total_s=total,
            parts_s=parts,
            waits=[self._with_meanwhile(record, wait) for wait in record.waits],
            chunks=list(record.chunks),
            num_chunks=record.num_chunks,
            preemptions=list(record.preemptions),
            finish=record.finish,
            num_prompt=record.num_prompt,
            num_cached=record.num_cached,
            num_overtaken=record.num_overtaken,
            tokens_recomputed=record.recomputed,
            ttft_s=None if record.first is None else record.first - record.queued,
            predicted_ttft_s=record.predicted,
            device_s=device,
            kv_block_s=record.block_s + record.blocks * max(0.0, now - record.blocks_at),
            is_resumed=record.is_resumed,
        )

    def _with_meanwhile(self, record: _Record, wait: WaitNote) -> WaitNote:
        begin = record.queued + wait.at_s
        end = begin + wait.seconds
        low, high = (bisect_right(self._steps, at, key=lambda step: step.now) for at in (begin, end))
        first, after = (self._steps[at] if at < len(self._steps) else self._sums for at in (low, high))
        count = max(1, high - low)
        meanwhile = Meanwhile(
            steps=high - low,
            running=round((after.running - first.running) / count, 2),
            waiting=round((after.waiting - first.waiting) / count, 2),
            prompt_tokens=after.prompt_tokens - first.prompt_tokens,
            generated_tokens=after.generated_tokens - first.generated_tokens,
            admitted=bisect_left(self._admitted, end) - bisect_left(self._admitted, begin),
            least_free_blocks=min((step.free_blocks for step in islice(self._steps, low, high)), default=0),
        )
        return WaitNote(wait.at_s, wait.seconds, wait.reasons, meanwhile)


def _with(before: Mapping[WaitReason, Waited], after: _Reasons) -> dict[WaitReason, Waited]:
    return {**before, **dict(after)}
