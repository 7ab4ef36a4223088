"""What speculation gains over plain decoding, by what is asked: edits, quotations, chat; one request or many.

Two engines of one model answer in turns, the second with speculation; both must give the same tokens. Answers are
greedy and end where they end, but for those of many rows. Each round has a namespace of its own, so that past outputs
are those of other prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from headway.backends.cpu import LoadedCpu
from headway.bench.in_turns import Timed, step_in_turns
from headway.bench.speculation_prompts import CHAT, CODE, EDITS, QUOTES
from headway.build import build_engine
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.errors import EngineError
from headway.text.chat import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams

_TOKENS = 120
_ROWS = (16, 32)
_CONTEXT = 1500
_VERIFIED = 4
_STEPS = 40
_WRONG = 3  # a token that the model gives nowhere


@dataclass(frozen=True, slots=True)
class TwoSpeeds:
    """Tokens per second without and with speculation, a value per round."""

    case: str
    num_rows: int
    plain: Sequence[float]
    speculating: Sequence[float]


def speculation_rows(config: EngineConfig, loaded: LoadedCpu, rounds: int) -> list[TwoSpeeds]:
    """One request at a time for each kind of prompt, then many at once."""
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    source = loaded.source
    with closing(ChatTemplate(source.chat_template, source.bos_token, source.eos_token)) as template:
        chats = [template.render([{"role": "user", "content": text}]) for text in CHAT]
    asked = {
        "edit": [tokenizer.encode(text) for text in EDITS],
        "quote": [tokenizer.encode(text) for text in QUOTES],
        "code": [tokenizer.encode(text) for text in CODE],
        "chat": [tokenizer.encode(chat, add_special=False) for chat in chats],
    }
    engines = build_engine(_without(config), replace(loaded, draft=None)), build_engine(config, loaded)
    try:
        found = [_alone(name, prompts, engines, rounds) for name, prompts in asked.items()]
        return found + [_together(num_rows, asked, engines, rounds) for num_rows in _ROWS]
    finally:
        for engine in engines:
            engine.close()


def _without(config: EngineConfig) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, speculation="off", draft_model=None))


def _alone(name: str, prompts: Sequence[list[int]], engines: tuple[Engine, Engine], rounds: int) -> TwoSpeeds:
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0)
    speeds = _in_turns([[(prompt, params)] for prompt in prompts], engines, rounds)
    return TwoSpeeds(f"speculation, {name}", 1, *speeds)


def _together(
    num_rows: int, asked: Mapping[str, Sequence[list[int]]], engines: tuple[Engine, Engine], rounds: int
) -> TwoSpeeds:
    """All of a length, so that there are as many rows to the end; each prompt has something of its own."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [asked["chat"][at % len(asked["chat"])] for at in range(num_rows)]
    jobs = [([*prompt[:-8], 50 + at, *prompt[-8:]], params) for at, prompt in enumerate(prompts)]
    return TwoSpeeds("speculation, chat", num_rows, *_in_turns([jobs], engines, rounds))


def _in_turns(
    batches: Sequence[list[tuple[list[int], SamplingParams]]], engines: tuple[Engine, Engine], rounds: int
) -> tuple[list[float], list[float]]:
    """Output tokens per second of all batches, one after the other, by each engine in each round."""
    speeds: tuple[list[float], list[float]] = [], []
    for turn in range(-1, rounds):  # the first is not counted: caches are cold
        done = [[Timed(engine, jobs, f"round{turn}") for engine in engines] for jobs in batches]
        for runs in done:
            step_in_turns(runs)
        for at, seen in enumerate(speeds):
            runs = [each[at] for each in done]
            if turn >= 0:
                seen.append(sum(run.num_timed for run in runs) / sum(run.seconds for run in runs))
        if any(plain.tokens != speculating.tokens for plain, speculating in done):
            raise EngineError("speculation changed a token, which it never must; please report this with the model")
    return speeds


def verify_row(config: EngineConfig, loaded: LoadedCpu, rounds: int) -> TwoSpeeds:
    """Steps per second of one row behind a long context, with one token and with draft tokens, which are wrong."""
    engine = build_engine(_without(config), replace(loaded, draft=None))
    plain, verifying = list[float](), list[float]()
    num_steps = 2 * min(_STEPS, 200 // rounds)
    params = SamplingParams(max_tokens=rounds * num_steps + 10, temperature=0.0, ignore_eos=True)
    try:
        engine.add(Submit(0, [(37 * i) % loaded.spec.vocab_size for i in range(_CONTEXT)], params))
        state = engine.scheduler.state
        req = state.live[0]
        while req.num_output < 2:
            engine.step()
        state.rows.await_results(req, state.step)
        for _ in range(rounds):
            seconds: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(num_steps):
                req.draft = (_WRONG,) * (_VERIFIED - 1) * (turn % 2)
                engine.step()
                seconds[turn % 2].append(engine._step_s)
            plain.append(1.0 / statistics.median(seconds[0]))
            verifying.append(1.0 / statistics.median(seconds[1]))
        engine.abort(0)
    finally:
        engine.close()
    return TwoSpeeds(f"steps of {_VERIFIED} tokens behind {_CONTEXT:,}", 1, plain, verifying)
