"""`LLM`: the engine in your own process and thread. Texts or tokens in, answers out; no server, no wire, no thread.

llm = LLM()
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from os import PathLike, fspath
from types import TracebackType

from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.config_text import AdapterSource
from headway.engine.client import EngineInfo, Output, RequestTiming, Stats, Submit
from headway.engine.ranked import open_forecast
from headway.errors import ConfigError, RequestError, RowFailed
from headway.text.answer import AnswerText
from headway.text.chat import ChatTemplate
from headway.text.defaults import SamplingDefaults
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams, choice_seed
from headway.values.plan import TokenLogprob

_IDLE_S = 0.001

Prompt = str | Sequence[int]
Message = Mapping[str, object]
Progress = Callable[[int, int], None]
"""Called after every step with the number of answers that have ended and of tokens so far; may raise to give up."""
Params = SamplingParams | Mapping[str, object]
"""How to sample: exactly so; or, as a mapping, some fields of it, and the others as the model recommends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # one per token if asked for
    finish_reason: str  # stop or length


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its answers."""

    prompt: str | None  # None if the prompt was given as tokens
    prompt_tokens: list[int]
    outputs: list[Answer]
    num_cached: int  # prompt tokens found in the cache
    timing: RequestTiming | None  # of the first answer


@dataclass(slots=True, eq=False)
class _Job:
    """One answer under way."""

    submit: Submit
    prompt: int
    text: AnswerText
    is_watched: bool  # token by token, not when it has ended
    shown: list[str] = field(default_factory=list)
    num_taken: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Output | None = None


class LLM:
    """Owns one engine and drives it in the caller's thread; not to be shared between threads.

    Several streams may be read in turns, and calls made meanwhile: whichever steps the engine, all of them grow.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        **fields: object,
    ) -> None:
        """`fields` are those of `EngineConfig.of`, such as kv_memory_gb=1; `adapters` are directories by name."""
        if adapters:
            fields["adapter"] = tuple(f"{name}={fspath(path)}" for name, path in adapters.items())
        fields |= {} if model is None else {"model": model}
        if config is not None and fields:
            raise ConfigError("LLM takes either config or separate options, not both; put them all into config")
        config = config or EngineConfig.of(**fields)
        loaded = load(config)
        source = loaded.source
        self._source = source  # its conversion is in use while this is kept
        self._defaults = SamplingDefaults.of(source.sampling, config.sampling)
        self._engine = build_engine(config, loaded, keeps_tokens=True)
        self._tokenizer = Tokenizer.open(source.tokenizer_path())
        self._template = ChatTemplate(source.chat_template, source.bos_token, source.eos_token)
        self._forecast = open_forecast(config.scheduler)
        self._next_id = 0
        self._live: dict[int, _Job] = {}  # answers under way, of all calls
        self._watched: dict[int, _Job] = {}  # some of these
        self._grown: dict[int, _Job] = {}  # those that have grown or ended since their call last looked

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def defaults(self) -> SamplingDefaults:
        """The sampling values of answers for which none are given."""
        return self._defaults

    def stats(self) -> Stats:
        """The engine's counters: tokens computed, generated, found in the cache, and so on."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        on_progress: Progress | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
        *,
        adapter: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Answer every prompt, together; with an adapter, or one for each.

        `on_completion(index, completion)` is called as soon as all answers to a prompt have ended.
        What `params` does not say is as the model recommends; an explicit `SamplingParams` says everything.

        A request at fault raises RequestError before anything runs.
        """
        texts = as_list(prompts)
        tokens = [self._encode(prompt) for prompt in texts]
        return self._complete(texts, tokens, params, on_progress, on_completion, adapter)

    def _complete(
        self,
        texts: Sequence[Prompt],
        tokens: list[list[int]],
        params: Params | Sequence[Params] | None,
        on_progress: Progress | None,
        on_completion: Callable[[int, Completion], None] | None,
        adapter: str | Sequence[str],
    ) -> list[Completion]:
        is_one = isinstance(params, SamplingParams | Mapping)
        all_params: list[Params] = [params] * len(texts) if is_one else list(params or ())  # type: ignore[list-item, arg-type]
        all_params = all_params or [{}] * len(texts)
        if len(all_params) != len(texts):
            raise RequestError(f"{len(all_params)} params for {len(texts)} prompts; give one, or one for each")
        names = [adapter] * len(texts) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(texts):
            raise RequestError(f"{len(names)} adapters for {len(texts)} prompts; give one, or one for each")
        jobs = [
            job
            for index, (ids, mine, name) in enumerate(zip(tokens, all_params, names, strict=True))
            for job in self._jobs(index, ids, self._fill(mine, len(ids)), name)
        ]
        by_prompt: list[list[_Job]] = [[] for _ in texts]
        for job in jobs:
            by_prompt[job.prompt].append(job)
        completions: dict[int, Completion] = {}
        with closing(self._drive(jobs, on_progress)) as growth:
            for index in (grown.prompt for grown in growth):
                if index not in completions and all(job.end is not None for job in by_prompt[index]):
                    completions[index] = self._completion(texts[index], tokens[index], by_prompt[index])
                    if on_completion is not None:
                        on_completion(index, completions[index])
        return [completions[index] for index in range(len(texts))]

    def _completion(self, prompt: Prompt, tokens: list[int], jobs: Sequence[_Job]) -> Completion:
        first = jobs[0].end
        assert first is not None
        return Completion(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=tokens,
            outputs=[self._answer(choice, job) for choice, job in enumerate(jobs)],
            num_cached=first.cached_tokens,
            timing=first.timing,
        )

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        on_progress: Progress | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
        *,
        adapter: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Like `generate`, of one conversation or several: each a list of {"role", "content"} messages."""
        texts = [self._template.render(messages) for messages in _as_conversations(conversations)]
        tokens = [self._tokenizer.encode(text, add_special=False) for text in texts]  # the template has the specials
        return self._complete(texts, tokens, params, on_progress, on_completion, adapter)

    def stream(
        self, prompt: Prompt, params: Params | None = None, on_progress: Progress | None = None, *, adapter: str = ""
    ) -> Generator[str, None, int]:
        """One prompt's answer as it grows, piece by piece; returns how many tokens it had."""
        return self._stream(self._encode(prompt), params, on_progress, adapter)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        on_progress: Progress | None = None,
        *,
        adapter: str = "",
    ) -> Generator[str, None, int]:
        """Like `stream`, of one conversation."""
        return self._stream(self._render(messages), params, on_progress, adapter)

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load the adapter in a directory that PEFT saved; answers can be asked of it from now on."""
        self._engine.load_adapter(AdapterSource(name, fspath(path)))

    def unload_adapter(self, name: str) -> None:
        """Free an adapter; ConfigError while a stream has it."""
        self._engine.unload_adapter(name)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        # The template has written the special tokens already.
        return self._tokenizer.encode(self._template.render(messages), add_special=False)

    def _stream(
        self, tokens: list[int], params: Params | None, on_progress: Progress | None, adapter: str
    ) -> Generator[str, None, int]:
        (job,) = self._jobs(0, tokens, self._fill(params or {}, len(tokens)), adapter, is_watched=True)
        # A reader that stops early closes this generator, which does not close the inner one at once.
        with closing(self._drive([job], on_progress)) as growth:
            for ready in growth:
                piece = "".join(ready.shown)
                ready.shown.clear()  # before others read on: their steps add to it
                if piece:
                    yield piece
        return job.num_taken

    def close(self) -> None:
        """Release threads and memory; idempotent."""
        self._engine.close()
        self._template.close()
        if self._forecast is not None:
            self._forecast.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _fill(self, params: Params, num_prompt: int) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params
        info = self.info
        limit = min(info.max_model_len, info.num_blocks * info.block_size)
        return self._defaults.params(params, limit - num_prompt)

    def _jobs(
        self, prompt: int, tokens: list[int], params: SamplingParams, adapter: str, *, is_watched: bool = False
    ) -> list[_Job]:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.info.eos_ids))
        jobs: list[_Job] = []
        if params.grammar:
            self._engine.compile(params.grammar)
        for choice in range(params.n):
            parent = jobs[0].submit.id if jobs else None
            submit = Submit(self._next_id, tokens, params, choice_seed(seed, choice), parent=parent, adapter=adapter)
            self._next_id += 1
            self._engine.validate(submit)
            text = AnswerText(self._tokenizer, params.stops, ends)
            jobs.append(_Job(submit, prompt, text, is_watched or bool(params.stops)))
        return jobs

    def _drive(self, jobs: list[_Job], on_progress: Progress | None) -> Generator[_Job]:
        """Feed the engine and step it until every job has ended; yields jobs as they grow."""
        waiting, mine = deque(jobs), {job.submit.id: job for job in jobs}
        num_tokens = 0
        try:
            while mine:
                while waiting and self._engine.has_room:
                    job = waiting.popleft()
                    self._add(job.submit)
                    self._live[job.submit.id] = job
                    if job.is_watched:
                        self._watched[job.submit.id] = job
                if self._grown.keys().isdisjoint(mine):  # else another call has stepped the engine
                    num_tokens += self._step()
                for id in [id for id in self._grown if id in mine]:
                    job = self._grown.pop(id)
                    if job.end is not None:
                        del mine[id]
                        if job.end.finish == "error":
                            raise RowFailed(f"prompt {job.prompt}: {job.end.error}")
                    yield job
                if on_progress is not None:
                    on_progress(len(jobs) - len(mine), num_tokens)
        finally:
            for id in mine:  # left early: by an error, or because the reader closed the stream
                self._grown.pop(id, None)
                if self._forget(id) is not None:
                    self._learn(self._engine.abort(id))
            self._engine.keep_blocks()

    def _step(self) -> int:
        """One step of the engine, for all calls; returns how many tokens it gave."""
        live, emission = self._live, self._engine.step()
        if emission.idle_s is not None:
            time.sleep(_IDLE_S)  # KV is on its way, read by another thread
        for id, entries in emission.logprobs.items():
            if id in live:
                live[id].logprobs += entries
        if self._watched:
            for id, token in zip(emission.ids, emission.tokens, strict=True):
                if id in self._watched:
                    self._watch(self._watched[id], [token])
        for output in emission.finished:
            # Unknown is one that was given up when it had ended already and waited for the others of a static batch.
            job = self._forget(output.id)
            if job is not None:
                self._end(job, output)
        return len(emission.tokens)

    def _forget(self, id: int) -> _Job | None:
        """It is under way no more; None if it was not."""
        self._watched.pop(id, None)
        return self._live.pop(id, None)

    def _watch(self, job: _Job, tokens: Sequence[int]) -> None:
        """Follow a job's text; a stop string ends it here and now."""
        if job.text.is_stopped:
            return
        growth = job.text.push(tokens)
        job.shown.append(growth.text)
        job.num_taken += growth.num_taken
        self._grown[job.submit.id] = job
        if job.text.is_stopped:
            # None: this token was also the last one allowed; the request has ended and its terminal output follows.
            job.end = self._engine.abort(job.submit.id, "stop")
            self._learn(job.end)
            if job.end is not None:
                self._forget(job.submit.id)

    def _add(self, submit: Submit) -> None:
        self._engine.add(submit if self._forecast is None else self._forecast.predict(submit))

    def _learn(self, output: Output | None) -> None:
        if self._forecast is not None and output is not None:
            self._forecast.end(output.id, len(output.tokens), output.finish)

    def _end(self, job: _Job, output: Output) -> None:
        job.end = output
        self._grown[job.submit.id] = job
        if output.finish == "error":
            return
        self._learn(output)
        if not job.is_watched:
            growth = job.text.push(output.tokens)
            job.shown.append(growth.text)
            job.num_taken = growth.num_taken
        job.shown.append(job.text.finish())

    def _answer(self, choice: int, job: _Job) -> Answer:
        assert job.end is not None
        assert job.end.finish is not None
        return Answer(
            index=choice,
            text="".join(job.shown),
            token_ids=list(job.end.tokens[: job.num_taken]),
            logprobs=job.logprobs[: job.num_taken] if job.submit.params.logprobs is not None else None,
            finish_reason="stop" if job.text.is_stopped else job.end.finish,
        )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    return [given] if given and isinstance(given[0], Mapping) else given  # type: ignore[list-item, return-value]
