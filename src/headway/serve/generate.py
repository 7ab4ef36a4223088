"""Runs the answers of one HTTP request: submit, merge, count, abort what has not ended.

What comes of the answers is noted as it comes and taken in that order; `pump` says when.

`Generation` is a context manager: whatever way it is left, answers that have not ended are aborted. It yields text and
knows neither JSON nor SSE.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from types import TracebackType

from headway.engine.child import OVERLOADED
from headway.engine.client import Output, OutputSource, Submit
from headway.engine.streams import INTERRUPTED, SLOW_CONSUMER
from headway.errors import EngineDead, EngineError, Overloaded, RequestError, RowFailed
from headway.grammar.stops import RegexStop
from headway.serve.answer import Delta, ServedAnswer
from headway.serve.formats import FinishedAnswer, JsonTexts
from headway.serve.intent import Intent
from headway.serve.openai import PromptTokensDetails, RequestReport, Usage
from headway.serve.problem import Problem, interrupted, not_ready, shed
from headway.serve.pump import Pump
from headway.serve.ratelimit import Visit
from headway.serve.service import ServedModel, Service
from headway.text.answer_parts import AnswerParts
from headway.values.params import SamplingParams, choice_seed

log = logging.getLogger(__name__)

NO_INTENT = Intent()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and how it is to be answered."""

    tokens: Sequence[int]
    params: SamplingParams
    parts: AnswerParts | None = None  # of the text of its answers, if that is not all content
    end: RegexStop | None = None  # what ends them beside stop strings


class PlainAnswer:
    """The only answer to a request, as long as nothing but text is expected of it: what nearly every token is.

    `take` needs a fourth of the time of `Generation.take` and touches few objects: a front has thousands of streams,
    and what a token waits for most is memory. After a `Generation.take` another one is to be asked for.
    """

    __slots__ = ("_answer", "_known", "_note_itl", "_pump", "_stream")

    def __init__(
        self,
        answer: ServedAnswer,
        stream: OutputSource,
        known: JsonTexts,
        pump: Pump,
        note_itl: Callable[[float], None],
    ) -> None:
        self._answer = answer
        self._stream = stream
        self._known = known
        self._pump = pump
        self._note_itl = note_itl

    def take(self) -> bytes | None:
        """The text of the one token that has come, as JSON; None, and nothing is taken: something else has come."""
        text = self._stream.take_known(self._known)
        if text is not None:
            answer, now = self._answer, self._pump.now
            itl_s = now - answer.last
            if itl_s > answer.longest:
                answer.longest = itl_s
            answer.last = now
            answer.num_tokens += 1
            self._note_itl(itl_s)
        return text


class Generation:
    """The n answers to each prompt. `begun` once submitted; all ended or aborted when the context is left."""

    def __init__(self, service: Service, model: ServedModel, owner: str = "", visit: Visit | None = None) -> None:
        self._service = service
        self._owner = owner  # for the sums of its tenant
        self._visit = visit
        self._model = model
        self._arrival = time.monotonic()
        self._answers: list[ServedAnswer] = []
        self._prompts: Sequence[Prompt] = ()
        self._streams: list[OutputSource] = []
        self._arrived: deque[int] = deque()  # indices of answers of which something is there, if there are several
        self.num_open = 0  # answers whose terminal output was not taken
        self._on_arrival: Callable[[], None] | None = None
        self._counted: set[int] = set()  # indices of answers whose terminal output came
        self._n = 1
        self._stack = ExitStack()

    def __enter__(self) -> Generation:
        self._stack.enter_context(self._service.working())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.listen(None)
        for answer in self._answers:
            if answer.finish is None:
                self._service.metrics.ended("abort", time.monotonic() - self._arrival)
            self._service.release(answer.id)
            if answer.index < len(self._streams) and answer.index not in self._counted:
                self._service.look_after(self._count_rest(answer))
        if self._visit is not None and self._prompts:  # else another one of the same request has used it
            self._visit.settle(self.usage_so_far().total_tokens)
        self._stack.close()

    @property
    def model_name(self) -> str:
        """As responses say it."""
        return self._model.name

    def submit(self, prompts: Sequence[Prompt], *, n: int, salt: str = "", intent: Intent = NO_INTENT) -> None:
        """Hand everything to the engine. Answer i of prompt p has index p * n + i."""
        if self._visit is not None:
            self._visit.charge(sum(len(prompt.tokens) + n * prompt.params.max_tokens for prompt in prompts))
        self._prompts, self._n = prompts, n
        eos_ids = self._model.client.info.eos_ids
        is_single = n * len(prompts) == 1
        for prompt in prompts:
            parent: int | None = None
            seed = prompt.params.seed if prompt.params.seed is not None else secrets.randbits(63)
            for choice in range(n):
                id = self._service.new_id()
                own_seed = choice_seed(seed, choice)
                key = b"" if prompt.parts is None else _key(prompt, own_seed)
                end = None if prompt.end is None else prompt.end.copy()
                text = self._model.tokenizer, eos_ids, prompt.parts, key, end
                answer = ServedAnswer(len(self._answers), id, prompt.params, *text)
                self._answers.append(answer)
                submit = Submit(
                    id,
                    prompt.tokens,
                    prompt.params,
                    own_seed,
                    salt,
                    intent.priority,
                    parent,
                    intent.tenant,
                    intent.lane,
                    intent.route,
                    intent.slo,
                    namespace=intent.namespace,
                    adapter=self._model.adapter,
                    group=self._answers[0].id,
                    speculates=intent.speculates,
                )
                stream = self._model.client.submit(submit)
                if not is_single:
                    stream.listen(partial(self._note, answer.index))
                self._streams.append(stream)
                self._service.guard.sent(id, intent.tenant)
                parent = id if parent is None else parent
        self.num_open = len(self._streams)

    @property
    def ids(self) -> list[int]:
        """The engine's ids of the answers."""
        return [answer.id for answer in self._answers]

    @property
    def on_arrival(self) -> Callable[[], None] | None:
        """Called when something comes after all was taken."""
        return self._on_arrival

    @on_arrival.setter
    def on_arrival(self, told: Callable[[], None] | None) -> None:
        self._on_arrival = told
        if len(self._answers) == 1:
            self._streams[0].listen(told)

    def _note(self, index: int) -> None:
        is_first = not self._arrived
        self._arrived.append(index)
        if is_first and self._on_arrival is not None:
            self._on_arrival()

    def take(self) -> tuple[ServedAnswer, Delta] | None:
        """What an answer grew by; None if nothing has come that was not taken. Raises if the answer has failed."""
        while (arrived := self._next_output()) is not None:
            index, output = arrived
            answer = self._answers[index]
            if output.finish is not None:
                self.num_open -= 1
                self._service.settled(answer.id)
            try:
                if answer.finish is None:
                    if output.tokens:
                        self._clock(index, len(output.tokens))
                    return answer, self._push(answer, output)
                answer.push(output)  # its counts are still reported; there is no more text
            finally:
                if output.finish is not None:
                    self._count(answer, output)
        return None

    def _next_output(self) -> tuple[int, Output] | None:
        if len(self._answers) == 1:
            output = self._streams[0].take()
            return None if output is None else (0, output)
        while self._arrived:
            index = self._arrived.popleft()
            output = self._streams[index].take()
            if output is not None:
                return index, output
        return None

    def plain(self) -> PlainAnswer | None:
        """The only answer, if nothing but text is expected now; None: everything is to be taken by `take`."""
        answer = self._answers[0]
        if len(self._answers) > 1 or not answer.last or answer.texts is not self._model.tokenizer.whole_texts:
            return None
        service = self._service
        return PlainAnswer(answer, self._streams[0], self._model.json_texts, service.pump, service.metrics.itls.append)

    def _push(self, answer: ServedAnswer, output: Output) -> Delta:
        if output.finish is not None:
            self._require_sound(answer, output)
        delta = answer.push(output)
        if delta.finish is not None:
            self._service.metrics.ended(answer.finish or "error", time.monotonic() - self._arrival)
            if output.finish is None:
                # A stop string: only this side can see it. The terminal output, with its counts, is still to come.
                self._model.client.abort(answer.id, "stop")
        return delta

    def _count(self, answer: ServedAnswer, output: Output) -> None:
        """An answer's counts and times are known now."""
        self._counted.add(answer.index)
        num_prompt = len(self._prompts[answer.index // self._n].tokens)
        is_first = answer.index % self._n == 0  # of the answers to its prompt; `usage` counts a prompt once too
        self._service.history.usage(self._owner).add(num_prompt if is_first else None, answer.num_tokens, output)
        self._service.metrics.counted(num_prompt, answer.num_tokens, answer.longest, output)

    async def _count_rest(self, answer: ServedAnswer) -> None:
        """What was computed for an answer whose client has left is its owner's all the same."""
        final = Output(answer.id, finish="abort")
        async for output in self._streams[answer.index]:
            answer.num_tokens += len(output.tokens) if answer.finish is None else 0
            final = output
        self._count(answer, final if final.finish is not None else Output(answer.id, finish="abort"))

    async def whole(self) -> list[FinishedAnswer]:
        """All answers, complete."""
        whole = [
            FinishedAnswer(at, self._prompts[at // self._n].params.logprobs is not None)
            for at in range(len(self._answers))
        ]

        def take() -> bool:
            while (growth := self.take()) is not None:
                answer, delta = growth
                whole[answer.index].add(delta)
            return not self.num_open

        await self._service.pump.follow(self, take)
        return whole

    def log_fields(self) -> dict[str, object]:
        """What the log says about this request beside its response: tokens, times, how it ended."""
        usage, report = self.usage_so_far(), self.report()
        finishes = [answer.finish or "abort" for answer in self._answers]
        told: dict[str, object] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": sum(answer.cached_tokens for answer in self._answers[:: self._n]),
            "finish": finishes[0] if len(set(finishes)) == 1 else ",".join(finishes[:8]),
        }
        if report is not None:
            for name in ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "preemptions"):
                told[name] = getattr(report, name)
        return told

    def usage(self) -> Usage:
        """Tokens of all answers; a prompt counts once, however many answers it has."""
        usage = self.usage_so_far()
        # The first answer to a prompt computes it; the others find all of it in the cache.
        num_cached = sum(answer.cached_tokens for answer in self._answers[:: self._n])
        usage.prompt_tokens_details = PromptTokensDetails(num_cached)
        return usage

    def usage_so_far(self) -> Usage:
        """As `usage`, before all has ended: what came from the cache is not known yet."""
        num_prompt = sum(len(prompt.tokens) for prompt in self._prompts)
        num_output = sum(answer.num_tokens for answer in self._answers)
        return Usage(num_prompt, num_output, num_prompt + num_output)

    def report(self) -> RequestReport | None:
        """The timings of the answers; None if the engine reported none."""
        ends = [answer.end for answer in self._answers if answer.end is not None]
        times = [end.timing for end in ends if end.timing is not None]
        if not times:
            return None
        slowest = max(times, key=lambda timing: timing.total_s)
        met = [end.slo_met for end in ends if end.slo_met is not None]
        return RequestReport(
            queue_ms=_ms(slowest.queued_s),
            prefill_ms=_ms(slowest.prefill_s),
            decode_ms=_ms(slowest.decode_s),
            preempted_ms=_ms(slowest.preempted_s),
            total_ms=_ms(slowest.total_s),
            ttft_ms=_ms(slowest.first_token_s),
            predicted_ttft_ms=None if slowest.predicted_s is None else _ms(slowest.predicted_s),
            preemptions=sum(end.preemptions for end in ends),
            tokens_recomputed=sum(end.tokens_recomputed for end in ends),
            slo_met=all(met) if met else None,
            device_ms=_ms(sum(end.device_s for end in ends)),
            kv_block_seconds=round(sum(end.kv_block_s for end in ends), 6),
        )

    def _require_sound(self, answer: ServedAnswer, output: Output) -> None:
        if output.finish == "abort":
            raise not_ready("the server is shutting down and has cut this answer off")
        if output.finish not in ("error", "shed"):
            return
        answer.finish = output.finish
        self._service.metrics.ended(output.finish, time.monotonic() - self._arrival)
        if output.finish == "shed":
            raise _shed(output)
        published = self._model.client.published
        if output.code == OVERLOADED and published is not None:  # the engine knew more than was published
            raise self._service.guard.overloaded("too many requests are waiting", published.each_s)
        raise _failure(output, self._model.client.dead)

    def _clock(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        answer = self._answers[index]
        if not answer.last:
            self._service.guard.begun(answer.id)
            self._service.metrics.first_token(now - self._arrival)
        else:
            self._service.metrics.itls.append((now - answer.last) / num_tokens)
            answer.longest = max(answer.longest, now - answer.last)
        answer.last = now


def _key(prompt: Prompt, seed: int) -> bytes:
    """What the ids of calls follow from: as reproducible as the answer, and another one in another turn."""
    return sha256(seed.to_bytes(8, "little") + array("q", prompt.tokens).tobytes()).digest()


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _shed(output: Output) -> Problem:
    if output.retry_after_s is not None:
        return shed(output.error or "this request's objective is infeasible", output.retry_after_s)
    waited_s = output.timing.total_s if output.timing is not None else 0.0
    message = (
        f"this request's objective could not be met any more after {waited_s:.3g} s in the queue; nothing was computed "
        "for it: retry later, give it more time in slo, or send it without"
    )
    return shed(message, waited_s)  # the queue is at least as long as the request has waited in it


def _failure(output: Output, dead: str | None) -> EngineError:
    message = output.error or "the engine gave no reason"
    if dead is not None:
        return EngineDead(message)
    if output.code == INTERRUPTED:
        return interrupted(message)
    if output.code == OVERLOADED:
        return Overloaded(message, retry_after_s=2.0)
    if output.code == SLOW_CONSUMER:
        return RequestError(message, code=SLOW_CONSUMER)
    if output.code is not None or output.param is not None:
        return RequestError(message, param=output.param, code=output.code)
    log.error("request %d failed inside the engine: %s", output.id, message)
    return RowFailed("this request failed inside the engine; others are not affected")
