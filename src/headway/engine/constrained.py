"""Requests whose answers follow a grammar: which tokens they may take next, and which the grammar leaves no choice but.

    add ─▶ compiled beside the engine ─▶ enters the scheduler ─▶ each step: masks ─▶ submit ─▶ collect ─▶ its tokens

A grammar changes nothing but what its own request may sample. Tokens without an alternative are proposed as drafts: the
step that verifies them, each under its own mask, gives what single steps would have given. Where an answer is in its
grammar follows from its tokens, so a preemption changes nothing here and another engine can go on with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.waits import note_wait
from headway.engine.client import Output
from headway.engine.executor import Late
from headway.errors import RequestError
from headway.grammar.compiler import Found, GrammarCompiler
from headway.grammar.exactly import ExactMatcher
from headway.grammar.matcher import Matcher
from headway.values.plan import StepPlan
from headway.values.states import State, WaitReason

log = logging.getLogger(__name__)

_MOST_DRAFTS = 16
FAULT = "grammar_too_complex"


class Constraints:
    """Every request with a grammar is in `_entering` until that is compiled, then in `_matchers` until it ends."""

    def __init__(self, compiler: GrammarCompiler, scheduler: Scheduler, *, verifies: bool) -> None:
        self._compiler = compiler
        self._scheduler = scheduler
        self._verifies = verifies  # the executor takes draft tokens
        self._entering: dict[int, tuple[Request, Callable[[Request], None]]] = {}
        self._matchers: dict[int, Matcher | ExactMatcher] = {}
        self._grown: list[int] = []  # requests with new tokens, for which nothing was proposed since

    @property
    def has_work(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._entering)

    @property
    def entering(self) -> list[Request]:
        """Requests that wait for their grammars."""
        return [req for req, _ in self._entering.values()]

    @property
    def num_entering(self) -> int:
        """Requests that wait for their grammars: the scheduler does not count them."""
        return len(self._entering)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when a grammar is compiled."""
        self._compiler.wake_by(wake)

    def compile(self, grammar: str) -> None:
        """Compile a grammar now, so that its requests need not wait; RequestError if it cannot be."""
        self._compiler.compile(grammar)

    def begin(self, req: Request, enter: Callable[[Request], None]) -> None:
        """Call `enter` in a later turn, once the request's grammar is compiled."""
        self._entering[req.id] = req, enter
        self._compiler.start(req.id, req.params.grammar)

    def drop(self, id: int) -> bool:
        """Forget a request; True if it waited for its grammar: the scheduler has not seen it."""
        return self._entering.pop(id, None) is not None

    def turn(self, now: float) -> list[Output]:
        """Requests whose grammars are compiled enter; the terminal outputs of those that cannot."""
        outputs: list[Output] = []
        if self._entering:
            for id, found in self._compiler.done():
                req, enter = self._entering.pop(id, (None, None))
                if req is None or enter is None:  # aborted meanwhile
                    continue
                try:
                    self._matchers[id] = self._placed(req, found)
                    note_wait(req, WaitReason.GRAMMAR, now)
                    enter(req)
                except RequestError as error:
                    self._matchers.pop(id, None)
                    code = error.code or "invalid_value"
                    outputs.append(Output(id, finish="error", error=str(error), code=code, param=error.param))
        if self._verifies:
            self._propose()
        return outputs

    def _placed(self, req: Request, found: Found) -> Matcher | ExactMatcher:
        """Behind the output that another engine made, if there is some."""
        if isinstance(found, RequestError):
            raise found
        if not found.take(req.tokens[req.num_prompt :]):
            raise RequestError("the output so far does not follow the grammar of this request", param="grammar")
        return found

    def _propose(self) -> None:
        grown, self._grown = self._grown, []
        for id in grown:
            matcher, req = self._matchers.get(id), self._scheduler.state.live.get(id)
            if matcher is not None and req is not None and req.state is State.RUNNING:
                req.draft = matcher.forced(_MOST_DRAFTS)

    def masks(self, plan: StepPlan) -> Late:
        """What the rows of a plan may sample; they wait for feedback, so all their tokens so far are known here."""
        if not self._matchers:
            return Late()
        at = self._scheduler.state.at
        rows = [(chunk, self._matchers.get(at(chunk.row).id)) for chunk in plan.chunks if chunk.samples]
        return Late(tuple((chunk.row, matcher.masks(chunk.drafts)) for chunk, matcher in rows if matcher is not None))

    def took(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """These requests got these tokens, in this order."""
        if self._matchers:
            for id, token in zip(ids, tokens, strict=True):
                matcher = self._matchers.get(id)
                if matcher is not None:
                    matcher.take((token,))
                    if self._verifies:
                        self._grown.append(id)

    def ended(self, id: int) -> str:
        """Forget a request; why its grammar could not be followed any further, empty if it could."""
        matcher = self._matchers.pop(id, None)
        error = "" if matcher is None else matcher.error
        if error:
            log.warning("the grammar of request %d could not be followed to its end: %s", id, error)
        return error

    def close(self) -> None:
        self._compiler.close()
