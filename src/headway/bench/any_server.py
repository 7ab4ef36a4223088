"""Latencies and goodput of any server that speaks OpenAI's API, as a client sees them.

Prompts are plain words, as many as the workload has tokens; a token is about a word, and the server's own count is
printed where it sends one. Only standard fields are sent, so an answer may end before its length. A request that fails
is counted, and does not end the run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.bench.client import Target, offered, run_requests
from headway.bench.console import print_json, progress
from headway.bench.latency import Answered, Objectives, print_latencies, summary
from headway.bench.setup import at_least_one
from headway.bench.workload import WorkItem, named
from headway.errors import ConfigError, EngineError

_TEXT = """time people way water day part sound work place year back thing name sentence line farm end land home hand
air animal house page letter point mother answer study learn plant cover food sun thought city tree cross start story
sea draw left run while press close night life north book carry science eat room friend idea picture"""
WORDS = _TEXT.split()
WARM_UP = WorkItem([1, 2, 3], 4)
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class UrlLoad:
    """What is sent: so many requests of a workload in each round, so many at a time."""

    workload: str = "chat-mix"
    requests: int = 32
    streams: int = 32
    rounds: int = 3
    seed: int = 0
    endpoint: str = "chat"
    extra_body: str | None = None

    def body(self, work: WorkItem, salt: str) -> dict[str, object]:
        """One request; with another `salt` its beginning differs, so that no server finds it in its cache."""
        text = " ".join([salt, *(WORDS[token % len(WORDS)] for token in work.tokens)])
        prompt = {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}
        fixed = {"max_tokens": work.max_tokens, "temperature": 0, "stream": True}
        return {**prompt, **fixed, "stream_options": {"include_usage": True}, **self.extra()}

    def extra(self) -> dict[str, Any]:
        """The fields that the user adds."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"extra_body is {self.extra_body!r}, which is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"extra_body is {self.extra_body!r}; allowed: a JSON object of fields")
        return fields


def run_url(
    url: str, load: UrlLoad, *, model: str | None, api_key: str | None, objectives: Objectives, as_json: bool
) -> int:
    """Print the table; with `as_json` the last line is one object. Raises if no request was answered."""
    at_least_one(requests=load.requests, streams=load.streams, rounds=load.rounds)
    load.extra()
    works = named(load.workload).make(load.requests, load.seed)
    names = offered(url, api_key) if model is None else [model]
    target = Target.of(url, names[0], api_key)
    _send(target, load, [WARM_UP], "warm-up")
    seconds: list[float] = []
    answers: list[Answered] = []
    with progress("serve", load.rounds) as update:
        for number in range(load.rounds):
            began = time.perf_counter()
            found = _send(target, load, works, f"{load.seed}.{number}")
            seconds.append(max(began + 1e-9, *(at for _, at in found)) - began)
            answers += [answer for answer, _ in found]
            update(number + 1)
    _report(url, target, load, answers, seconds, summary(answers, objectives), as_json)
    return 0


def _send(target: Target, load: UrlLoad, works: Sequence[WorkItem], salt: str) -> list[tuple[Answered, float]]:
    """What became of each request, and when that was."""
    prepared = [target.post(PATHS[load.endpoint], load.body(work, f"{salt}.{i}")) for i, work in enumerate(works)]
    streams = run_requests(target, prepared, load.streams)
    found = [(stream.read(), stream.sent) for stream in streams]
    faults = [answer.fault for answer, _ in found if answer.fault is not None]
    if len(faults) == len(found):
        raise EngineError(f"{target.host}:{target.port} answered no request: {faults[0]}")
    return [(answer, sent + answer.e2e_s) for answer, sent in found]


def _report(
    url: str,
    target: Target,
    load: UrlLoad,
    answers: Sequence[Answered],
    seconds: Sequence[float],
    seen: dict[str, Any],
    as_json: bool,
) -> None:
    whole = [answer for answer in answers if answer.fault is None]
    out_tokens = sum(answer.num_tokens for answer in whole)
    prompts = [answer.num_prompt for answer in whole if answer.num_prompt is not None]
    wall = sum(seconds)
    record: dict[str, object] = {
        "url": url,
        "model": target.model,
        "workload": load.workload,
        "n": load.requests,
        "streams": load.streams,
        "rounds": load.rounds,
        "seed": load.seed,
        "endpoint": load.endpoint,
        "in_tok": sum(prompts) if len(prompts) == len(whole) else None,
        "out_tok": out_tokens,
        "out_tok_s": round(out_tokens / wall, 1),
        "requests_s": round(len(whole) / wall, 2),
        "runs_s": [round(each, 3) for each in seconds],
        **seen,
    }
    lengths = f"{statistics.mean(answer.num_tokens for answer in whole):.0f} tokens per answer"
    if prompts:
        lengths = f"{statistics.mean(prompts):.0f} tokens per prompt, {lengths}"
    sent = f"{load.workload}, {load.requests} requests, {load.streams} streams, rounds: {load.rounds}"
    speed = f"{record['out_tok_s']} output tok/s, {record['requests_s']} requests/s"
    title = f"{target.model} at {url}: {sent}\n{speed}; {lengths}"
    print_latencies(seen, len(answers), title)
    if seen["failed"]:
        reason = next(answer.fault for answer in answers if answer.fault is not None)
        print(f"the first that failed: {reason}", flush=True)
    if as_json:
        print_json(record)
