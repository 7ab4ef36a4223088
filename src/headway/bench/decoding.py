"""What ways of decoding cost and gain over plain decoding of the same model: answers held to a grammar, speculation,
adapters.

Engines make a step in turn, in this thread and without a server; of each the medians of rounds count. Answers are
greedy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench.adapted import ROWS, adapter_speeds
from headway.bench.console import print_json, print_table
from headway.bench.in_turns import Timed, step_in_turns
from headway.bench.setup import ModelSetup, at_least_one, describe
from headway.bench.speculation import speculation_rows, verify_row
from headway.build import build_engine
from headway.config import EngineConfig
from headway.errors import ConfigError, EngineError
from headway.grammar import source
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams

CASES = ("grammar", "speculation", "verify", "adapters")
_TOKENS = 100
_ROWS = 32
_RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, object]] = {
    "text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 2000}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "records": {"type": "array", "items": _RECORD, "minItems": 40},
}
"""Neither is complete after so few tokens."""


@dataclass(frozen=True, slots=True)
class DecodingRow:
    """One comparison; `runs` are the second setup's tokens per second over the first one's, round by round."""

    case: str
    num_rows: int
    tok_s: float
    base_tok_s: float
    runs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.runs)


def run(
    setup: ModelSetup,
    *,
    case: Sequence[str] = CASES,
    rounds: int = 5,
    draft_model: str | None = None,
    as_json: bool = False,
) -> int:
    """Print a line per comparison; with `as_json` the last line is one object."""
    at_least_one(rounds=rounds)
    for name in case:
        if name not in CASES:
            raise ConfigError(f"there is no case {name!r}; there are: {', '.join(CASES)}")
    config = setup.config(max_num_seqs=64, touch_kv=True, prefix_caching=False, draft_model=draft_model)
    loaded = load_model(config)
    rows: list[DecodingRow] = []
    if "grammar" in case:
        rows += held_rows(config, loaded, rounds)
    if "speculation" in case:
        guesses = "suffix" if draft_model is None else "model"
        guessing = replace(config, scheduler=replace(config.scheduler, speculation=guesses))
        rows += [_row(*astuple(each)) for each in speculation_rows(guessing, loaded, rounds)]
    if "verify" in case:
        rows.append(_row(*astuple(verify_row(config, loaded, rounds))))
    if "adapters" in case:
        plain = replace(config, scheduler=replace(config.scheduler, speculation="off", draft_model=None))
        speeds = adapter_speeds(plain, replace(loaded, draft=None), rounds)
        base = speeds.pop("none")
        rows += [_row(name, ROWS, base, seen) for name, seen in speeds.items()]
    found = [
        {"case": row.case, "rows": row.num_rows, "tok_s": round(row.tok_s, 1), "base_tok_s": round(row.base_tok_s, 1)}
        | {"ratio": round(row.ratio, 3), "ratios": [round(ratio, 3) for ratio in row.runs]}
        for row in rows
    ]
    names = ("case", "rows", "tok_s", "base_tok_s", "ratio")
    print_table(names, [[row[name] for name in names] for row in found], f"{rounds} rounds in turns, medians")
    if as_json:
        print_json({"rows": found, "rounds": rounds} | describe(loaded, config))
    return 0


def held_rows(config: EngineConfig, loaded: LoadedCpu, rounds: int) -> list[DecodingRow]:
    """Half of the rows held to a schema, over none of them."""
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    prompts = [tokenizer.encode(f"Here is a list of facts, number {at}:") for at in range(_ROWS)]
    free = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in ("free", *SCHEMAS)}
    engines = {name: build_engine(config, loaded) for name in speeds}
    try:
        for turn in range(-1, rounds):  # the first is not counted: caches are cold
            runs = []
            for name, engine in engines.items():
                grammar = source.json_schema(SCHEMAS[name]) if name in SCHEMAS else ""
                if grammar:
                    engine.compile(grammar)
                held = SamplingParams(max_tokens=_TOKENS, temperature=0.0, grammar=grammar, ignore_eos=not grammar)
                runs.append(Timed(engine, [(prompt, held if i % 2 else free) for i, prompt in enumerate(prompts)]))
            step_in_turns(runs)
            for run, seen in zip(runs, speeds.values(), strict=True):
                if any(len(tokens) != _TOKENS for tokens in run.tokens):
                    raise EngineError(f"an answer of {_TOKENS} tokens ended early")
                if turn >= 0:
                    seen.append(run.num_timed / run.seconds)
    finally:
        for engine in engines.values():
            engine.close()
    return [_row(f"grammar, {name}", _ROWS, speeds["free"], speeds[name]) for name in SCHEMAS]


def _row(case: str, num_rows: int, base: Sequence[float], speeds: Sequence[float]) -> DecodingRow:
    ratios = tuple(one / other for one, other in zip(speeds, base, strict=True))
    return DecodingRow(case, num_rows, statistics.median(speeds), statistics.median(base), ratios)
