"""`CudaExecutor`: plans in, results out, on a device that computes while the host plans on.

    submit      checks, pokes, packet into a pinned slot, replay of a recorded step; waits for nothing
    collect     watches the slot's flag, reads its tokens
    prepare     records one more bucket of steps, while there is nothing else to do

Rows are checked and advanced on the host when a plan is submitted: lengths do not depend on what is sampled. A row that
cannot run is left out with its reason; logits that are not finite are reported by the device, and the row's token is
then a legal one, because the next plan may be queued already. A device that can no longer be used, or was given a part
of a plan and not the rest, is the end of this executor and of its process: no row is to blame. Nothing is scheduled
here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine.executor import Capacity, Late
from headway.errors import EngineDead, EngineError
from headway.kernels.cuda import rows as row_kernels
from headway.kernels.cuda import special
from headway.kernels.cuda.layout import COUNTER_MASK, TOKEN_BITS, Status
from headway.runner.cuda.drafts import DraftEntries, count_right, samples_of, shortened, verifies_of
from headway.runner.cuda.graphs import Graphs
from headway.runner.cuda.kvstore import CudaKVStore
from headway.runner.cuda.packet import PacketShape, Words, by_entry, mask_lines, pack
from headway.runner.cuda.state import DeviceState, Pokes, is_special
from headway.runner.cuda.wire import Wire
from headway.runner.inputs import can_run, decode_rows
from headway.runner.slots import Slots, has_penalties
from headway.values.plan import Chunk, Join, StepPlan, StepResult

log = logging.getLogger(__name__)

_SPINS = 20_000  # looks at a flag between two questions whether the device is still sound
_NONE = np.zeros(0, np.int64)
_REASONS = {
    Status.NOT_FINITE: "logits are not finite",
    Status.MASKED: "no token is left to choose: every one is masked",
}


@dataclass(slots=True)
class _Pending:
    """A plan between submit and collect."""

    plan: StepPlan
    step: int = -1  # it never reached the device
    rows: list[int] = field(default_factory=list)  # of the sampled entries, in the packet's order
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[int, int, int]] = field(default_factory=list)  # (entry, row, how many)
    decoded: tuple[NDArray[np.int64], NDArray[np.int64]] = (_NONE, _NONE)  # rows and places of their tokens
    places: list[int] = field(default_factory=list)  # where tokens of the chunks' entries belong; -1: known, a guess's
    verifies: list[DraftEntries] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # memory that queued kernels read
    is_begun: bool = False  # the device was given a part of it


class CudaExecutor:
    """At most `slots - 1` plans are submitted and not collected; results come in submit order, one per plan."""

    def __init__(
        self, graphs: Graphs, state: DeviceState, kv: CudaKVStore, slots: Slots, wire: Wire, shape: PacketShape
    ) -> None:
        self.graphs = graphs
        self._state, self._kv, self._slots, self._wire, self._shape = state, kv, slots, wire, shape
        self._capacity = Capacity(
            *(kv.num_blocks, kv.block_size, slots.num_rows, kv.host_blocks, graphs.step_sizes),
            verifies=True,
            verifies_penalized=False,
            lacks=("dry_multiplier", "xtc_probability"),
        )
        self._packets: list[NDArray[np.int32]] = list(wire.packets.numpy())
        self._tokens: list[NDArray[np.int32]] = list(wire.tokens.numpy())
        self._flags: NDArray[np.int32] = wire.flags.numpy()
        self._times: list[NDArray[np.int64]] = list(wire.times.numpy())
        self._is_cuda = wire.counter.device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._step = 0
        self._special: set[int] = set()  # rows that ask for more than a temperature
        self._counted: set[int] = set()  # rows whose tokens so far change the logits: they verify no drafts
        self._late: Pokes = {}  # of rows of whose guesses some were wrong, for the next plan
        self._logprobs: dict[int, int] = {}  # row -> how many alternatives it wants
        self._joined = np.full(slots.num_rows, -1, np.int64)  # the plan that gave a row to its request
        self._masks: dict[int, dict[int, Sequence[Words]]] = {}  # by plan, until it is submitted, and row
        self._last_submitted = -1
        self._dead: BaseException | None = None
        self._is_closed = self._is_rehearsed = False
        self.waited_s = 0.0  # in collect, for the device
        self.last_ns = (0, 0)  # begin and end of the step collected last, by the device's clock

    def capacity(self) -> Capacity:
        """Blocks and rows this executor has room for."""
        return self._capacity

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves behind in all layers."""
        return self._kv.bytes_per_token

    def fill_kv(self) -> None:
        """Random numbers in every cell, for measuring."""
        self._kv.fill()

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan on the device; never waits for an earlier one."""
        self._check_alive()
        assert len(self._pending) < self._wire.slots, "a slot would be written before its step was collected"
        pending = _Pending(plan)
        self._last_submitted = plan.id
        masks = self._masks.pop(plan.id, {})
        try:
            self._queue(plan, pending, masks)
        except Exception as error:
            log.exception("plan %s failed", plan.id)
            self._check_sound(error if pending.is_begun else None)
            reason = error if isinstance(error, EngineError) else repr(error)
            rows = {*plan.decode, *(chunk.row for chunk in plan.chunks), *(join.row for join in plan.joins)}
            self._slots.set_aside(dict.fromkeys(rows, f"the step failed: {reason}"), pending.failed)
        self._pending.append(pending)

    def supply(self, plan_id: int, late: Late) -> None:
        """Take the masks of a plan that is about to be submitted: they travel in its packet."""
        self._check_alive()
        if late and plan_id <= self._last_submitted:
            raise EngineError(f"masks for plan {plan_id} came after its submission; this executor needs them before")
        size, words = self._slots.vocab_size, self._shape.mask
        self._masks[plan_id] = {row: mask_lines(mask, size, words) for row, mask in late.masks}

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected plan and return what it did."""
        self._check_alive()
        assert self._pending, "collect without a submitted plan would wait for ever"
        pending = self._pending[0]
        if pending.step < 0:
            while pending.held and not self._check_sound(None):
                pass  # queued kernels read that memory, and no step's flag will say that they have
            self._pending.popleft()
            return StepResult(pending.plan.id, [0] * len(pending.plan.sampling_rows()), failed=pending.failed)
        slot = pending.step % self._wire.slots
        self._wait(slot, (pending.step + 1) & COUNTER_MASK)
        self._pending.popleft()
        return self._result(pending, slot)

    def close(self) -> None:
        """Wait for the device to finish what was queued and let go of it; idempotent."""
        is_closed, self._is_closed = self._is_closed, True
        if not is_closed and self._is_cuda and self._dead is None:
            torch.cuda.synchronize()

    def prepare(self) -> bool:
        """Record a bucket that no step has needed yet, or compile what is in none; False if nothing is left to do.

        Waits for the device.
        """
        self._check_alive()
        try:
            return self.graphs.record_next() or (self._is_cuda and self._rehearse_rest())
        except Exception:
            log.exception("a bucket could not be recorded; it will be when a step needs it")
            self._check_sound(None)
            return True

    def _queue(self, plan: StepPlan, pending: _Pending, masks: Mapping[int, Sequence[Words]]) -> None:
        if plan.steps != 1:
            raise EngineError(f"a plan asks for {plan.steps} repeats of its decode part; this executor runs 1")
        slots, failed, pokes = self._slots, pending.failed, Pokes(self._late)
        if plan.leaves or plan.copies or plan.joins or plan.grows:
            self._apply(plan, pending, pokes)
        before = len(failed)
        decode = decode_rows(plan, slots, failed)
        chunks = [chunk for chunk in plan.chunks if can_run(chunk, slots, failed)]
        if any(chunk.drafts for chunk in chunks):
            num = len(decode) + sum(bool(chunk.samples) for chunk in chunks)
            chunks = shortened(chunks, slots.num_rows - num, self._counted)
        samples = samples_of(decode, chunks, failed) if chunks else []
        if len(failed) > before:
            self._slots.set_aside(dict(failed), failed)
        if len(pokes) > self._shape.pokes:
            pending.held.append(self._poke(pokes))
            pokes = Pokes()
        slot = self._step % self._wire.slots
        sampled = [*decode.tolist(), *(sample.row for sample in samples)]
        pending.verifies = verifies_of(len(decode), samples, chunks)
        masked = by_entry(masks, sampled) if masks else {}
        packed = pack(self._packets[slot], self._shape, decode, chunks, samples, slots.tokens, pokes, masked)
        self.graphs.replay(self.graphs.bucket(packed, is_special=bool(self._special or masked)))
        pending.is_begun = True
        self._late.clear()
        if plan.copies:
            self._kv.send()
        pending.step = self._step
        self._step = (self._step + 1) & COUNTER_MASK
        guessed = {verify.row for verify in pending.verifies}
        pending.places = [at if at >= slots.known[row] and row not in guessed else -1 for _, row, at in samples]
        self._advance(decode, chunks)
        pending.decoded = decode, slots.length[decode]
        pending.rows = sampled
        if self._logprobs:
            wanted = self._logprobs
            pending.logprobs = [(i, row, wanted[row]) for i, row in enumerate(pending.rows) if row in wanted]

    def _apply(self, plan: StepPlan, pending: _Pending, pokes: Pokes) -> None:
        slots, state, failed = self._slots, self._state, pending.failed
        self._slots.each(self._leave, plan.leaves, lambda row: row, failed)
        if plan.copies:
            pending.held += self._kv.copy(plan.copies, lambda: self._begin(pending))

        def join(value: Join) -> None:
            slots.join(value)
            self._joined[value.row] = plan.id
            if state.join(value, pokes):
                pending.held.append(self._count(value))
            self._forget(value.row)
            if is_special(value.params):
                self._special.add(value.row)
            if has_penalties(value.params):
                self._counted.add(value.row)
            if value.params.logprobs is not None:
                self._logprobs[value.row] = min(value.params.logprobs, slots.vocab_size)

        self._slots.each(join, plan.joins, lambda value: value.row, failed)
        self._slots.each(slots.grow, plan.grows, lambda value: value.row, failed)
        for grow in plan.grows:
            if grow.row not in failed:
                state.grow(grow, pokes)

    def _begin(self, pending: _Pending) -> None:
        """Copies come first, and a step takes their time too."""
        pending.is_begun = True
        if self._is_cuda:
            row_kernels.start_clock[(1,)](self._wire.began, num_warps=1)

    def _leave(self, row: int) -> None:
        self._slots.leave(row)
        self._joined[row] = self._last_submitted
        self._forget(row)

    def _forget(self, row: int) -> None:
        self._special.discard(row)
        self._counted.discard(row)
        self._logprobs.pop(row, None)

    def _count(self, join: Join) -> Tensor:
        """Begin the counts of a row with penalties; its tokens must live until that has run."""
        tokens = torch.from_numpy(np.array(join.tokens, np.int32))
        tokens = tokens.pin_memory() if self._is_cuda else tokens
        counts = self._state.counts
        special.count_tokens[(1,)](
            *(tokens, counts, join.row, join.num_prompt, len(join.tokens), counts.shape[1]),
            **{"BLOCK": 2048, "num_warps": 8},
        )
        return tokens

    def _rehearse_rest(self) -> bool:
        """Launch, once and without effect, what some plans queue beside their step; whether this was the time."""
        if self._is_rehearsed:
            return False
        self._is_rehearsed = True
        counts = torch.zeros_like(self._state.counts[:1])
        words = torch.zeros(16, dtype=torch.int32)
        words = words.pin_memory() if self._is_cuda else words
        special.count_tokens[(1,)](words, counts, 0, 1, 1, counts.shape[1], BLOCK=2048, num_warps=8)
        row_kernels.poke[(1,)](words, self._state.words, 0, BLOCK=1024, num_warps=4)
        if self._is_cuda:
            row_kernels.start_clock[(1,)](torch.zeros_like(self._wire.began), num_warps=1)
            torch.cuda.synchronize()
        self._kv.rehearse()
        return True

    def _poke(self, pokes: Pokes) -> Tensor:
        """Change words of the state at once, not through a packet; the words must live until that has run."""
        num = len(pokes)
        words = torch.from_numpy(np.array([*pokes.keys(), *pokes.values()], np.int32))
        words = words.pin_memory() if self._is_cuda else words
        row_kernels.poke[(-(-num // 1024),)](words, self._state.words, num, BLOCK=1024, num_warps=4)
        return words

    def _advance(self, decode: NDArray[np.int64], chunks: Sequence[Chunk]) -> None:
        slots = self._slots
        slots.length[decode] += 1
        slots.known[decode] += 1
        for chunk in chunks:
            end = chunk.start + chunk.count - len(chunk.drafts)
            slots.length[chunk.row] = end
            if chunk.samples and not chunk.drafts:
                slots.known[chunk.row] = max(slots.known[chunk.row], end + 1)

    def _wait(self, slot: int, target: int) -> None:
        flags, began = self._flags, time.perf_counter()
        while flags[slot] != target:
            for _ in range(_SPINS):
                if flags[slot] == target:
                    break
            else:
                self._check_device(slot, target)
        self.waited_s += time.perf_counter() - began

    def _check_device(self, slot: int, target: int) -> None:
        if self._check_sound(None) and self._flags[slot] != target:
            self._check_sound(EngineError("the device is idle and a queued step left no result"))

    def _check_sound(self, failure: Exception | None) -> bool:
        """Whether the device is idle. Raises EngineDead if it can no longer be used, or after this failure."""
        is_idle = False
        try:
            is_idle = self._is_idle()
        except Exception as error:  # of an earlier kernel: from then on every call raises it
            failure = error
        if failure is not None:
            self._dead = failure
            self._check_alive()
        return is_idle

    def _is_idle(self) -> bool:
        return not self._is_cuda or bool(torch.cuda.current_stream().query())

    def _result(self, pending: _Pending, slot: int) -> StepResult:
        plan, failed = pending.plan, pending.failed
        began, ended = self._times[slot].tolist()
        self.last_ns = (began, ended)
        words = self._tokens[slot][: len(pending.rows)]
        counts: dict[int, int] = {}
        if pending.verifies:
            words = words.copy()
            counts = self._verify(pending, words)
        stopped: list[int] = []
        if len(words) and words.max() > TOKEN_BITS:
            found = [(pending.rows[i], int(words[i])) for i in np.flatnonzero(words > TOKEN_BITS)]
            stopped = [row for row, word in found if word & Status.STOPPED]
            reasons = {row: why for row, word in found for bit, why in _REASONS.items() if word & bit}
            self._set_aside(reasons, pending)
            words = words & TOKEN_BITS
        self._keep(pending, words)
        tokens = words.tolist()
        if failed or counts:
            counts = {row: count for row, count in counts.items() if row not in failed}
            mine: dict[int, list[int]] = {}
            for row, token in zip(pending.rows, tokens, strict=True):
                mine.setdefault(row, []).append(token)
            tokens = [t for row in plan.sampling_rows() for t in mine.get(row, [0])[: counts.get(row, 1)]]
        return StepResult(
            plan_id=plan.id,
            tokens=tokens,
            counts=counts,
            stopped=[row for row in stopped if row not in failed] if failed else stopped,
            failed=failed,
            logprobs=self._wire.logprobs_of(slot, pending.logprobs, counts, failed) if pending.logprobs else {},
            elapsed=(ended - began) * 1e-9,
        )

    def _verify(self, pending: _Pending, words: NDArray[np.int32]) -> dict[int, int]:
        """Keep the tokens up to the first wrong guess of each row with drafts; how many, by row. Others become 0."""
        counts = {}
        for first, row, base, drafts in pending.verifies:
            end = first + len(drafts) + 1
            counts[row] = count = count_right(words[first:end].tolist(), drafts)
            words[first + count : end] = 0
            if self._joined[row] <= pending.plan.id:
                tokens = (words[first : first + count] & TOKEN_BITS).tolist()
                self._slots.extend(row, base, tokens)
                if count <= len(drafts):
                    self._state.go_on(row, base + count - 1, tokens[-1], self._late)
        return counts

    def _keep(self, pending: _Pending, words: NDArray[np.int32]) -> None:
        """Give rows their new tokens: chunks read them from the host, and one that waits for every token of its own,
        or that decoded and has drafts now, goes on with a chunk."""
        rows, places = pending.decoded
        mine = self._joined[rows] <= pending.plan.id
        self._slots.tokens[rows[mine], places[mine]] = words[: len(rows)][mine]
        entries = zip(pending.rows[len(rows) :], pending.places, words[len(rows) :].tolist(), strict=True)
        for row, place, token in entries if pending.places else ():
            if place >= 0 and self._joined[row] <= pending.plan.id:
                self._slots.tokens[row, place] = token

    def _set_aside(self, reasons: Mapping[int, str], pending: _Pending) -> None:
        """Fail rows that the device found unfit, unless a later plan has given them to another request already."""
        mine = {row: why for row, why in reasons.items() if self._joined[row] <= pending.plan.id}
        self._slots.set_aside(mine, pending.failed)
        for row, why in reasons.items():
            pending.failed.setdefault(row, why)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the device can no longer be used ({self._dead!r}); start a new engine") from self._dead
        if self._is_closed:
            raise EngineDead("the executor is closed; start a new engine")
