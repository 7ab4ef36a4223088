"""Speculation: running requests get guesses of their next tokens, which one step verifies.

    decodes ── a guess is worth it ──▶ waits for its results ── guesses ──▶ a step verifies them ──╮
       ◀──────────── no guess is ────────────┴──────────────────────◀──────────────────────────────╯

Tokens are drawn by seed and position, so a verified guess is the very token that decoding would have given. Which
guesses are worth it follows from how often they were right and from what steps of each size take; where none can be,
rows decode as without speculation, and nothing is looked up. It proposes; the scheduler gives what there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.spec.acceptance import MODEL, OWN, PAST, Acceptance, Acceptances, kind_of
from headway.spec.choice import can_gain, lengths
from headway.spec.suffix import LONGEST, NO_MATCH, Match, PastOutputs, SuffixIndex
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan, StepResult
from headway.values.work import Work

_SURE_LENGTH = 3  # of a match in the request itself: then past outputs are not asked
_FIRST_ROUND = 0.2  # of a step, until it is measured
_FORGET_ROUND = 0.998  # of what a round took, with every step in which it is too much to be tried
_LEAST_OUTPUT = 8  # tokens of an output that is worth remembering
_IDLE_STEPS = 8  # for which it holds that no guess gains anything beside so many rows


@dataclass(slots=True, eq=False)
class _Speculating:
    """A request that may have guesses; `guess` is what is expected behind its tokens as they were."""

    req: Request
    acceptance: Acceptance
    index: SuffixIndex
    source: int = OWN
    guess: Match = NO_MATCH
    num_right: int = 0  # tokens of the guess that have come since

    def look_up(self, past: PastOutputs, most: int) -> list[float]:
        """Guess anew; the chance of each token of the guess, all before it included."""
        req, index = self.req, self.index
        if len(index.tokens) < len(req.tokens):
            index.extend(req.tokens[len(index.tokens) :])
        context = req.tokens[-LONGEST:]
        self.source, self.guess, self.num_right = OWN, index.find(context, most), 0
        if self.guess.length < _SURE_LENGTH:
            other = past.find(req.chain, context, most)
            rate = self.acceptance.rate
            if rate(kind_of(PAST, other.length)) > rate(kind_of(OWN, self.guess.length)):
                self.source, self.guess = PAST, other
        chance, chances = 1.0, []
        for i in range(len(self.guess.guess)):
            chance *= self.acceptance.rate(kind_of(self.source, self.guess.length + i))
            chances.append(chance)
        return chances

    def chances_of_model(self, most: int) -> list[float]:
        """The chance of each token that a draft model guesses, all before it included."""
        chance, chances = 1.0, []
        for place in range(most):
            chance *= self.acceptance.rate(kind_of(MODEL, place))
            chances.append(chance)
        return chances

    def verified(self, num_drafts: int, num_right: int) -> None:
        """Learn from what came of a draft model's guesses."""
        for place in range(min(num_drafts, num_right + 1)):
            self.acceptance.learn(kind_of(MODEL, place), place < num_right)

    def came(self, token: int) -> None:
        """Learn from the next token, if there is a guess for it."""
        length, guess = self.guess
        is_right = guess[self.num_right] == token
        self.acceptance.learn(kind_of(self.source, length + self.num_right), is_right)
        self.num_right += 1
        if not is_right or self.num_right == len(guess):
            self.guess = NO_MATCH


class Speculation:
    """Every live request that may have guesses is in `_requests`; those that wait for results though they could decode
    ahead are in `_waiting`."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        most: int,
        depth: int,
        has_model: bool = False,
        takes_penalties: bool = True,
        times: VerifyTimes | None = None,
    ) -> None:
        self._scheduler, self._rows = scheduler, scheduler.state.rows
        self._most = most  # draft tokens of a row
        self._depth = depth
        self._takes_penalties = takes_penalties  # drafts of requests that have some can be verified
        self._has_model = has_model  # the executor guesses, and is told how many
        self._round_s = 0.0  # seconds in which a draft model guesses one token of each row
        self._requests: dict[int, _Speculating] = {}
        self._waiting: dict[int, Request] = {}
        self._guessing: dict[int, _Speculating] = {}  # by request: a guess whose tokens have not all come
        self._acceptances = Acceptances()
        self._past = PastOutputs()
        self._times = times or VerifyTimes()
        self._idle_rows = 0  # beside so many rows no guess gains anything
        self._idle_left = 0  # steps for which that holds
        self.num_drafts = 0  # rows of steps that verified some
        self.num_drafted = 0  # draft tokens that steps verified
        self.num_accepted = 0

    def begin(self, req: Request) -> None:
        """A request comes that may have guesses."""
        acceptance = self._acceptances.of(req.tenant, req.route)
        self._requests[req.id] = _Speculating(req, acceptance, SuffixIndex())

    def ended(self, req: Request) -> None:
        """It has ended: its output is known to later ones of its namespace."""
        self._waiting.pop(req.id, None)
        self._guessing.pop(req.id, None)
        if self._requests.pop(req.id, None) is not None and req.num_output >= _LEAST_OUTPUT:
            self._past.add(req.chain, req.tokens[req.num_prompt :])

    def propose(self) -> None:
        """Give each request the guesses that are worth it in the next step."""
        self._guessing.clear()
        if not self._requests:
            return
        num_rows = self._num_rows()
        if num_rows == self._idle_rows and self._idle_left > 0:
            self._idle_left -= 1
            return
        times = self._times.table()
        round_s = (self._round_s or _FIRST_ROUND * times[1]) if self._has_model else 0.0
        if not can_gain(times, num_rows, self._most, round_s):
            self._round_s *= _FORGET_ROUND**_IDLE_STEPS
            self._stop()
            if not self._waiting:
                self._idle_rows, self._idle_left = num_rows, _IDLE_STEPS - 1
            return
        self._idle_left = 0
        asking = [each for each in self._requests.values() if self._may_guess(each.req)]
        chances = [self._chances(each) for each in asking]
        if self._depth > 1 and num_rows > 1:  # a row that waits for its results misses every other step
            chances = [each if sum(each) > self._depth - 1 else [] for each in chances]
        for each, length in zip(asking, lengths(times, num_rows, chances, round_s), strict=True):
            if each.guess.length:
                self._guessing[each.req.id] = each
            self._set(each.req, each.guess.guess[:length], length)

    def _chances(self, each: _Speculating) -> list[float]:
        most = self._room(each.req)
        return each.chances_of_model(most) if self._has_model else each.look_up(self._past, most)

    def _num_rows(self) -> int:
        """Rows that decode or verify in the next step."""
        return self._rows.num_decoding + sum(req.row >= 0 for req in self._waiting.values())

    def _may_guess(self, req: Request) -> bool:
        can_verify = self._takes_penalties or not _has_penalties(req.params)
        return req.row >= 0 and req.num_output > 0 and not req.params.grammar and can_verify

    def _room(self, req: Request) -> int:
        return min(self._most, req.params.max_tokens - req.num_output - 1)

    def _set(self, req: Request, draft: tuple[int, ...], length: int) -> None:
        """So many draft tokens in the next step, if all its results are in; if there are none, decode.

        Without `draft` the executor guesses them.
        """
        is_waiting = req.id in self._waiting
        if length and not is_waiting and req.row >= 0 and self._rows.await_results(req, self._scheduler.state.step):
            self._waiting[req.id], is_waiting = req, True
        if is_waiting and len(req.tokens) > req.num_scheduled:
            if length:
                req.draft, req.num_drafts = draft, 0 if draft else length
            elif len(req.tokens) - req.num_scheduled == 1:
                del self._waiting[req.id]
                req.draft, req.num_drafts = (), 0
                self._rows.decode_ahead(req, self._scheduler.state.step)

    def _stop(self) -> None:
        """Let every row decode."""
        for req in [req for req in self._waiting.values() if req.row >= 0]:
            self._set(req, (), 0)

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run: learn what it took."""
        work, is_model = plan.work, False
        if work.verify:
            self.num_drafts += len(result.counts)
            verified = [chunk for chunk in plan.chunks if chunk.row in result.counts]
            self.num_drafted += sum(chunk.count - 1 for chunk in verified)
            self.num_accepted += sum(result.counts.values()) - len(result.counts)
            is_model = self._has_model and self._model_guessed(result)
        is_known = self._idle_left % 4 > 0  # steps that decode are many, and of one length for a while
        if not (work.chunks or work.copies or is_model or is_known):
            self._times.observe(work.decode + work.verify, max(0.0, result.elapsed - self._context_s(work)))

    def _context_s(self, work: Work) -> float:
        costs = self._scheduler.state.costs
        return costs.step(Work(context=work.context)) - costs.step(Work())

    def _model_guessed(self, result: StepResult) -> bool:
        """Learn from a step with chunks whose guesses the executor made; False: there was none."""
        step = self._scheduler.state.in_flight[0]
        asked = [(chunk, req) for chunk, req in step.chunks if chunk.num_drafts]
        for chunk, req in asked:
            each, count = self._requests.get(req.id), result.counts.get(chunk.row)
            if each is not None and count is not None and chunk.row not in step.void:
                each.verified(chunk.num_drafts, count - 1)
        work = step.plan.work
        if asked and not (work.chunks or work.copies) and any(chunk.row in result.counts for chunk, _ in asked):
            rounds = max(chunk.num_drafts for chunk, _ in asked)
            spent = (
                result.elapsed
                - self._context_s(work)
                - self._times.table()[min(MOST_TOKENS, work.decode + work.verify)]
            )
            each_s = max(1e-6, spent) / rounds
            self._round_s += (0.1 if self._round_s else 1.0) * (each_s - self._round_s)
        return bool(asked)

    def took(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """These requests got these tokens, in this order."""
        if self._guessing:
            for id, token in zip(ids, tokens, strict=True):
                each = self._guessing.get(id)
                if each is not None and each.guess.length:
                    each.came(token)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
