"""`CpuExecutor`: plans in, results out, computed in order of submission.

    engine thread     submit ──▶ plans ──▶ worker:  leaves, copies, joins, grows, forward, sample
                      collect ◀── results ◀──┘

The worker has a thread of its own where plans overlap; where each is waited for anyway, `submit` runs it on the
engine's thread and spares two wake-ups of a thread. A row that cannot run is reported as failed and the other rows
go on; what raises while it computes is found by computing halves (`contain`). Only a worker that has ended makes
`collect` raise. The newest token of a row stays in the slots: the next plan may be submitted before this one is
collected. Nothing is scheduled here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np

from headway.engine.executor import Capacity, Late
from headway.errors import EngineDead, EngineError
from headway.models.batch import ForwardBatch
from headway.runner.contain import StepPart, halves, parts_of, plan_of
from headway.runner.draft import DraftModel
from headway.runner.greedy import allowed_tokens, is_greedy_step
from headway.runner.inputs import StepInputs, Verify, build
from headway.runner.kvstore import KVStore
from headway.runner.sampler import NO_MASKS, Floats, Ints, Mask, Masks, picked, sample
from headway.runner.slots import Slots
from headway.runner.steady import SteadyInputs
from headway.runner.step_model import StepModel
from headway.values.plan import StepPlan, StepResult, Tier, TokenLogprob

log = logging.getLogger(__name__)


class CpuExecutor:
    """Results come in submit order, one per plan, whatever happened inside it.

    With a thread the slots and the KV store belong to it from the first submit on.
    """

    def __init__(
        self, model: StepModel, kv: KVStore, slots: Slots, *, has_thread: bool = True, draft: DraftModel | None = None
    ) -> None:
        sizes = kv.num_blocks, kv.block_size, slots.num_rows, kv.host_blocks
        self._capacity = Capacity(*sizes, verifies=True, guesses=True, drafts=draft is not None)
        self._plans: SimpleQueue[tuple[StepPlan, Masks] | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._num_open = 0  # submitted and not collected
        self._last_submitted = -1
        self._vocab_size = slots.vocab_size
        self._masks: dict[int, Masks] = {}  # by plan, until it is submitted
        self._dead: BaseException | None = None
        self._closing = Event()
        self.adapters = slots.adapters
        self._kv: KVStore | None = kv  # for whole blocks outside the plans; the worker has it for all else
        self._draft = draft
        worker = _Worker(model, kv, slots, draft)
        self._worker: _Worker | None = None if has_thread else worker
        self._thread: Thread | None = None
        if has_thread:
            loop = (worker, self._plans, self._results, self._closing)
            self._thread = Thread(target=_work, args=loop, name="headway-executor", daemon=True)
            self._thread.start()

    def capacity(self) -> Capacity:
        """Blocks and rows this executor has room for."""
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan, or run it at once where there is no thread for it."""
        self._check_alive()
        self._num_open += 1
        self._last_submitted = plan.id
        masks = self._masks.pop(plan.id, {})
        if self._worker is None:
            self._plans.put((plan, masks))
        else:
            self._run_here(self._worker, plan, masks)

    def supply(self, plan_id: int, late: Late) -> None:
        """Take the masks of a plan that is about to be submitted."""
        self._check_alive()
        if late and plan_id <= self._last_submitted:
            raise EngineError(f"masks for plan {plan_id} came after its submission; this executor needs them before")
        self._masks[plan_id] = {row: self._unpack(row, mask) for row, mask in late.masks}

    def _unpack(self, row: int, mask: bytes) -> Mask:
        """What masks allow, each. One that is broken allows nothing: its row fails when it samples, and no other."""
        wanted = -(-self._vocab_size // 8)
        if not mask or len(mask) % wanted:
            log.error("a mask of row %d has %d bytes; %d tokens take %d", row, len(mask), self._vocab_size, wanted)
            return np.zeros((1, wanted), np.uint8)
        return np.frombuffer(mask, np.uint8).reshape(-1, wanted)

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected plan and return what it did."""
        self._check_alive()
        assert self._num_open, "collect without a submitted plan would wait for ever"
        outcome = self._results.get()
        if isinstance(outcome, BaseException):
            self._dead = outcome
            self._check_alive()
        assert isinstance(outcome, StepResult)
        self._num_open -= 1
        return outcome

    def block_layout(self) -> str:
        """See MovesBlocks."""
        return self._store().block_layout

    def block_bytes(self) -> int:
        """See MovesBlocks."""
        return self._store().block_bytes

    def read_block(self, block: int, into: memoryview) -> None:
        """See MovesBlocks."""
        self._store().read(block, into)

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        """See MovesBlocks."""
        self._store().write(block, data, tokens, start)
        if self._draft is not None:
            self._draft.forget(block)

    def _store(self) -> KVStore:
        store = self._kv
        if store is None:
            raise EngineDead("the executor is closed; start a new engine")
        return store

    def close(self) -> None:
        """End the worker after the plan it is in, drop queued plans, let go of the KV pool; idempotent."""
        self._kv = None
        thread, self._thread, self._worker = self._thread, None, None
        self._closing.set()
        if thread is not None:
            self._plans.put(None)
            thread.join()

    def _run_here(self, worker: _Worker, plan: StepPlan, masks: Masks) -> None:
        outcome: StepResult | None = None
        try:
            outcome = worker.run(plan, masks)
        except KeyboardInterrupt:
            # Ctrl-C during the step: the state of its rows is undefined, so these rows end, and only they.
            outcome = worker.give_up(plan, "the step was interrupted")
            raise
        except BaseException as error:  # the same end as a worker thread's
            self._dead = error
        finally:
            if outcome is not None:
                self._results.put(outcome)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the executor's worker has ended ({self._dead!r}); start a new engine") from self._dead
        if self._closing.is_set():
            raise EngineDead("the executor is closed; start a new engine")


def _work(
    worker: _Worker,
    plans: SimpleQueue[tuple[StepPlan, Masks] | None],
    results: SimpleQueue[StepResult | BaseException],
    closing: Event,
) -> None:
    try:
        while (item := plans.get()) is not None and not closing.is_set():
            results.put(worker.run(*item))
    except BaseException as error:  # only this thread can report its end to the engine
        results.put(error)


@dataclass(slots=True)
class _Answers:
    """What a plan has yielded so far. `rows` and `tokens` are parallel: rows with one token, in the plan's order."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted: dict[int, list[int]] = field(default_factory=dict)  # row -> one token or more
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    is_split: bool = False  # computed in parts: `rows` are in another order than the plan's

    def in_order(self, plan: StepPlan) -> list[int]:
        """Tokens as `StepResult.tokens` lists them."""
        if not self.drafted and not self.failed and not self.is_split:
            return self.tokens  # the usual step: as many tokens as sampling rows, in their order
        single = dict(zip(self.rows, self.tokens, strict=True))
        placed: list[int] = []
        for row in plan.sampling_rows():
            placed.extend(self.drafted[row] if row in self.drafted else (single.get(row, 0),))
        return placed

    def stopped(self, stop_ids: Sequence[frozenset[int]]) -> list[int]:
        """Rows whose newest token ends them."""
        newest = [*zip(self.rows, self.tokens, strict=True), *((row, last[-1]) for row, last in self.drafted.items())]
        return [row for row, token in newest if token in stop_ids[row] and row not in self.failed]


def _reason(error: Exception) -> str:
    return f"the step failed: {error if isinstance(error, EngineError) else repr(error)}"


def _rows_of(plan: StepPlan) -> set[int]:
    return {*plan.decode, *(chunk.row for chunk in plan.chunks), *(join.row for join in plan.joins)}


class _Worker:
    """Owns the slots and the KV store; after every plan both are as the plan left them, failed rows set aside."""

    def __init__(self, model: StepModel, kv: KVStore, slots: Slots, draft: DraftModel | None) -> None:
        self._model = model
        self._draft = draft
        self._kv = kv
        self._slots = slots
        self._steady = SteadyInputs(slots)

    def run(self, plan: StepPlan, masks: Masks) -> StepResult:
        """Do everything the plan says; an error ends up in the result, never here."""
        began = time.perf_counter()
        answers = _Answers()
        try:
            self._apply(plan, answers.failed)
            if self._draft is not None:
                plan = self._draft.guess(plan)
            self._slots.set_aside(self._kv.audit(plan, self._slots), answers.failed)
        except Exception as error:
            log.exception("plan %s failed", plan.id)
            self._slots.set_aside(dict.fromkeys(_rows_of(plan), _reason(error)), answers.failed)
            return self._result(plan, answers, began)
        try:
            self._run_inputs(self._steady.build(plan) or build(plan, self._slots), masks, answers)
        except Exception as error:
            log.exception("plan %s failed; it is computed in halves, to find the rows that are at fault", plan.id)
            answers.is_split = True
            done = {*answers.rows, *answers.drafted, *answers.failed}
            self._run_halves(plan, parts_of(plan, done), masks, answers, error)
        return self._result(plan, answers, began)

    def _run_inputs(self, inputs: StepInputs, masks: Masks, answers: _Answers) -> None:
        self._slots.set_aside(inputs.failed, answers.failed)
        if inputs.batch is not None:
            self._compute(inputs, inputs.batch, masks, answers)

    def _run_halves(
        self, plan: StepPlan, parts: Sequence[StepPart], masks: Masks, answers: _Answers, error: Exception
    ) -> None:
        """These parts together raised: compute their halves, and fail what raises by itself."""
        if len(parts) <= 1:
            rows = [row for part in parts for row in part.rows]
            self._slots.set_aside(dict.fromkeys(rows, _reason(error)), answers.failed)
            return
        for half in halves(parts):
            try:
                self._run_inputs(build(plan_of(plan, half), self._slots), masks, answers)
            except Exception as fault:
                self._run_halves(plan, half, masks, answers, fault)

    def give_up(self, plan: StepPlan, reason: str) -> StepResult:
        """Whatever became of the plan, none of its rows goes on."""
        answers = _Answers()
        self._slots.set_aside(dict.fromkeys(_rows_of(plan), reason), answers.failed)
        return self._result(plan, answers, time.perf_counter())

    def _result(self, plan: StepPlan, answers: _Answers, began: float) -> StepResult:
        return StepResult(
            plan_id=plan.id,
            tokens=answers.in_order(plan),
            counts={row: len(values) for row, values in answers.drafted.items()},
            stopped=answers.stopped(self._slots.stop_ids),
            failed=answers.failed,
            logprobs=answers.logprobs,
            elapsed=time.perf_counter() - began,
        )

    def _apply(self, plan: StepPlan, failed: dict[int, str]) -> None:
        if plan.steps != 1:
            raise EngineError(f"a plan asks for {plan.steps} repeats of its decode part; this executor runs 1")
        if not (plan.leaves or plan.copies or plan.joins or plan.grows or plan.released):
            return  # the usual step
        self._slots.each(self._slots.leave, plan.leaves, lambda row: row, failed)
        self._kv.copy(plan.copies)
        if self._draft is not None:
            self._draft.copy(plan.copies)
        written = {copy.dst.id for copy in plan.copies if copy.dst.tier == Tier.DEVICE}
        self._kv.release([block for block in plan.released if block not in written])
        self._slots.each(self._slots.join, plan.joins, lambda join: join.row, failed)
        self._slots.each(self._slots.grow, plan.grows, lambda grow: grow.row, failed)

    def _compute(self, inputs: StepInputs, batch: ForwardBatch, masks: Masks, answers: _Answers) -> None:
        slots = self._slots
        logits, best = None, None
        if is_greedy_step(inputs, slots, masks):
            allowed = allowed_tokens(inputs, len(batch.sample_index), masks)
            best = self._model.pick(batch, self._kv.data, allowed)
            sampled = picked(best, inputs.index, inputs.rows)
        else:
            logits = self._model.forward(batch, self._kv.data)
            sampled = sample(logits, inputs.index, inputs.rows, inputs.positions, slots, masks)
        for chunk in inputs.computed:
            slots.length[chunk.row] = chunk.start + chunk.count
        if len(inputs.rows):
            slots.advance(inputs.rows, inputs.positions, sampled.tokens)
            self._slots.set_aside(sampled.failed, answers.failed)
            answers.rows += inputs.rows.tolist()
            answers.tokens += sampled.tokens.tolist()
            answers.logprobs.update({row: [entry] for row, entry in sampled.logprobs.items()})
        for verify in inputs.verifies:
            self._try_verify(verify, best, logits, masks.get(verify.row), answers)

    def _try_verify(
        self, verify: Verify, best: Ints | None, logits: Floats | None, mask: Mask | None, answers: _Answers
    ) -> None:
        try:
            if best is not None:
                self._accept(verify, best, answers)
            else:
                assert logits is not None
                self._verify(verify, logits, mask, answers)
        except Exception as error:  # the row has some of its tokens already: it cannot be computed again
            log.exception("the draft of row %d failed", verify.row)
            self._slots.set_aside({verify.row: _reason(error)}, answers.failed)

    def _accept(self, verify: Verify, best: Ints, answers: _Answers) -> None:
        """What `_verify` does, where the greedy choices are known."""
        row, base, first, drafts = verify
        chosen = best[first : first + len(drafts) + 1]
        count = 1
        for token, draft in zip(chosen.tolist(), drafts, strict=False):
            if token != draft or token in self._slots.stop_ids[row]:
                break
            count += 1
        sampled = picked(chosen, np.arange(count), np.full(count, row))
        self._slots.extend(row, base, sampled.tokens.tolist())
        self._slots.set_aside(sampled.failed, answers.failed)
        answers.drafted[row] = sampled.tokens.tolist()

    def _verify(self, verify: Verify, logits: Floats, mask: Mask | None, answers: _Answers) -> None:
        """Sample position by position while the draft had guessed right and nothing has ended.

        A sampled token is the one that decoding without drafts would have given: guesses change speed only.
        """
        row, base, first, drafts = verify
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        rows = np.array([row])
        for i in range(len(drafts) + 1):
            position = np.array([base + i])
            masks = NO_MASKS if mask is None else {row: mask[i : i + 1]}
            sampled = sample(logits[first + i : first + i + 1], np.array([0]), rows, position, self._slots, masks)
            self._slots.advance(rows, position, sampled.tokens)
            self._slots.set_aside(sampled.failed, answers.failed)
            tokens.append(int(sampled.tokens[0]))
            logprobs.extend(sampled.logprobs.values())
            is_over = sampled.failed or tokens[-1] in self._slots.stop_ids[row]
            if is_over or i == len(drafts) or tokens[-1] != drafts[i]:
                break
        answers.drafted[row] = tokens
        if logprobs:
            answers.logprobs[row] = logprobs
