"""`LogitRecorder`: stands in for a decoder and notes, bit for bit, which logits every token prefix was given.

A digest is kept per token prefix, and the same prefix must give the same digest in every run that shares the digests,
whatever else was in the batch. Measures nothing and knows no model library.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.engine.engine import Engine
from headway.models.batch import ForwardBatch
from headway.models.pick import Allowed, best_tokens
from headway.values.events import Admitted, Event, Preempted, PreemptReason
from headway.values.plan import StepPlan

Logits = NDArray[np.float32]
Watcher = Callable[[list[int], Logits], None]
"""Called with a token prefix and the logits of what follows it."""


class Forward(Protocol):
    """What is recorded of a decoder."""

    def forward(self, batch: ForwardBatch, kv: Any) -> Any:
        """Logits [S, vocab] of the batch's sample_index."""

    def pick(self, batch: ForwardBatch, kv: Any, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """The greedy choice of each line of them, among the allowed."""


class LogitRecorder:
    """Passes every forward on and keeps a digest of each row's logits under its whole token prefix."""

    def __init__(self, decoder: Forward, digests: dict[bytes, bytes], watcher: Watcher | None = None) -> None:
        self._decoder = decoder
        self._digests = digests
        self._watcher = watcher
        self._plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self._tokens: dict[int, list[int]] = {}  # row -> tokens known to the executor, then draft tokens
        self._guessed: dict[int, int] = {}  # row -> position of the first draft token in its last step
        self.mismatches: list[int] = []  # positions whose logits differed from an earlier run's
        self.num_rows = 0
        self.num_wrong_picks = 0  # tokens the decoder chose by itself that are not the best of its logits
        self.max_batch = 0  # rows of the largest step
        self.admitted: list[int] = []  # ids, in the order of their first admissions
        self.num_by_priority = 0  # preemptions for a more urgent request
        self.num_paused = 0  # rows, over all plans
        self._num_picks = 0

    def watch(self, engine: Engine) -> None:
        executor = engine._executor
        submit = executor.submit

        def noted(plan: StepPlan) -> None:
            self._plans.put(plan)
            self.num_paused += len(engine.scheduler.state.rows.paused)
            submit(plan)

        executor.submit = noted  # type: ignore[method-assign]
        emit = engine.metrics.emit

        def counted(event: Event) -> None:
            if isinstance(event, Admitted) and not event.is_resumed:
                self.admitted.append(event.id)
            self.num_by_priority += isinstance(event, Preempted) and event.reason is PreemptReason.PRIORITY
            emit(event)

        engine.metrics.emit = counted  # type: ignore[method-assign]

    def forward(self, batch: ForwardBatch, kv: Any) -> Any:
        logits = self._decoder.forward(batch, kv)
        plan = self._plans.get()
        for join in plan.joins:
            self._tokens[join.row] = list(join.tokens)
            self._guessed.pop(join.row, None)
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks if chunk.count)]
        self.max_batch = max(self.max_batch, len(rows))
        for line, index in enumerate(batch.sample_index.tolist()):
            row = rows[int(batch.row_of[index])]
            self._note(row, int(batch.positions[index]), int(batch.tokens[index]), np.asarray(logits[line]))
        for row in rows:
            self._guessed.pop(row, None)
        self._guessed |= {
            chunk.row: chunk.start + chunk.count - len(chunk.drafts) for chunk in plan.chunks if chunk.drafts
        }
        return logits

    def pick(self, batch: ForwardBatch, kv: Any, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """What the logits that were noted say; now and then the decoder's own choice, which must be the same."""
        expected = best_tokens(np.asarray(self.forward(batch, kv)), allowed)
        self._num_picks += 1
        if self._num_picks % 4:
            return expected
        best = self._decoder.pick(batch, kv, allowed)
        self.num_wrong_picks += int((best != expected).sum())
        return best

    def _note(self, row: int, position: int, token: int, logits: Logits) -> None:
        tokens = self._tokens[row]
        if position >= self._guessed.get(row, len(tokens)):
            del tokens[position:]  # what was guessed there may have been wrong
        if position == len(tokens):
            tokens.append(token)
        assert tokens[position] == token
        prefix = hashlib.sha256(repr(tokens[: position + 1]).encode()).digest()
        digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).digest()
        self.num_rows += 1
        if self._digests.setdefault(prefix, digest) != digest:
            self.mismatches.append(position)
        if self._watcher is not None:
            self._watcher(tokens[: position + 1], logits)
