"""`headway rank`: learn answers' lengths from a request log, and report the accuracy. Owns the flags alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

from headway.cli.args import BatchFlags, BatchSampling, EngineFlags, EngineOptions, Switch
from headway.cli.help import HELP_FLAGS
from headway.cli.terminal import progress
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.answers import Answer
    from headway.llm import LLM
    from headway.rank.log import Entry
    from headway.values.params import SamplingParams

EXAMPLES = """Examples:
  headway rank fit requests.jsonl --state ranker.npz
  headway rank eval requests.jsonl --load 1.2
  headway rank answers prompts.jsonl --log answers.jsonl --max-tokens 256"""
FIT_EXAMPLES = """Examples:
  headway rank fit requests.jsonl --state ranker.npz
  headway serve --policy ltr --rank-state ranker.npz"""
EVAL_EXAMPLES = """Examples:
  headway rank eval requests.jsonl
  headway rank eval requests.jsonl --load 0 --slots 8 --json | tail -1
  headway rank eval today.jsonl --state ranker.npz --no-routes"""
ANSWERS_EXAMPLES = """Examples:
  headway rank answers prompts.txt --log answers.jsonl --max-tokens 256 --temperature 0.7
  headway rank answers a.jsonl squad.json --log answers.jsonl --seconds 60"""

Loss = Literal["list", "pair"]


def create_app() -> App:
    app = App(
        name="rank", help="Learn how long answers get.", help_epilogue=EXAMPLES, help_flags=HELP_FLAGS, sort_key=6
    )
    app.command(fit, help_epilogue=FIT_EXAMPLES)
    app.command(evaluate, name="eval", help_epilogue=EVAL_EXAMPLES)
    app.command(answers, help_epilogue=ANSWERS_EXAMPLES)
    return app


def fit(log: Path, /, *, state: Path, loss: Loss = "pair", seed: int = 0) -> int:
    """Learn a ranker from a request log and save it, for --policy ltr with --rank-state.

    Parameters
    ----------
    log
        One JSON object per line, with "tokens" (of the prompt), "max_tokens", "num_output" and "finish".
    state
        The file to write.
    loss
        How order is taught: list by list (ListMLE) or pair by pair.
    seed
        Equal logs and seeds give equal files.
    """
    from headway.rank import train
    from headway.rank.learner import judge_model
    from headway.rank.log import read_log
    from headway.rank.model import save
    from headway.rank.offline import fit as learn
    from headway.rank.offline import split

    samples = [entry.sample() for entry in read_log(log)]
    # The guard starts from a held-out tau: that of a model trained on the earlier part alone.
    earlier, later = split(samples, 0.2)
    tau = judge_model(learn(earlier, seed=seed, loss=train.Loss(loss)), later)
    save(state, learn(samples, seed=seed, loss=train.Loss(loss)), {"tau": tau})
    print(f"learned from {len(samples)} requests; tau on the last {len(later)}, held out: {tau:.3f}; saved to {state}")
    return 0


def evaluate(
    log: Path,
    /,
    *,
    state: Path | None = None,
    held_out: float = 0.3,
    load: float = 1.2,
    slots: int = 32,
    no_routes: Switch = False,
    loss: Loss = "pair",
    seed: int = 0,
    json: Switch = False,
) -> int:
    """Report how well a ranker orders the later part of a log, and what a queue would gain by it.

    Parameters
    ----------
    log
        As for rank fit.
    state
        The ranker to evaluate; without one, it is learned from the earlier part of the log.
    held_out
        Share of the log, its last part, held out for evaluation.
    load
        Spread the arrivals so that they are so many times what the engine can serve; 0: all at once.
    slots
        Requests that run at the same time in the replay.
    no_routes
        Ignore tenants and routes, to evaluate the prompts alone.
    loss
        How order is taught: list by list (ListMLE) or pair by pair.
    seed
        Equal logs and seeds give equal results.
    json
        Print one JSON object as the last line.
    """
    from headway.bench import console
    from headway.bench.ranking import judge
    from headway.rank import train
    from headway.rank.log import read_log
    from headway.rank.model import load as load_model
    from headway.rank.offline import fit as learn
    from headway.rank.offline import split

    if load < 0 or slots < 1:
        raise ConfigError(f"load is {load:g} and slots is {slots}; allowed: a load of 0 or more, 1 slot or more")
    entries = _plain(read_log(log)) if no_routes else read_log(log)
    earlier, _ = split([entry.sample() for entry in entries], held_out)
    model = load_model(state)[0] if state else learn(earlier, seed=seed, loss=train.Loss(loss))
    report = judge(model, entries[: len(earlier)], entries[len(earlier) :], load=load, slots=slots)
    rows = [[each.order, each.mean_s, each.p99_s, each.mean_wait_s, each.share] for each in report.orders]
    title = (
        f"{report.num_held_out} held-out requests ({report.num_cut} cut) after {report.num_learned}: "
        f"tau {report.tau:.3f} (averages {report.tau_plain:.3f}), ceiling holds {report.coverage:.3f}, "
        f"{report.score_us:.0f} us to score one"
    )
    console.print_table(["order", "mean s", "P99 s", "first token s", "of the oracle's gain"], rows, title)
    if json:
        console.print_json(report.record())
    return 0


def _plain(entries: Sequence[Entry]) -> list[Entry]:
    return [replace(entry, tenant="", route="") for entry in entries]


def answers(
    *files: Path,
    log: Path,
    seconds: float = 3600.0,
    most: int = 4000,
    sampling: BatchFlags = BatchSampling(),
    engine: EngineFlags = EngineOptions(),
) -> int:
    """Answer the prompts of files with a model and log how long the answers got, for rank fit and eval.

    Parameters
    ----------
    files
        Prompts: lines of text, JSON lines or JSON with prompts, questions, instructions, turns or messages.
    log
        The request log to write; an existing one is continued.
    seconds
        Stop after so long; the next run goes on.
    most
        Prompts to answer in all, drawn from all files.
    """
    from headway.bench.answers import collect, read_prompts
    from headway.llm import LLM
    from headway.values.params import SamplingParams

    if not files:
        raise ConfigError("no file with prompts was given; name one or more")
    asked = read_prompts(files, seed=0)[:most]
    given = sampling.given()
    deadline = time.monotonic() + seconds
    llm = LLM(config=engine.config(None))
    params = SamplingParams(**llm.defaults.fill(given))
    try:
        with progress("answering", len(asked)) as bar:
            count = collect(
                _asking(llm, params),
                asked,
                log,
                params,
                deadline=deadline,
                on_progress=lambda done: bar.update(done, 0),
            )
    finally:
        llm.close()
    print(f"{log} has {count} of {len(asked)} answers")
    return 0


def _asking(llm: LLM, params: SamplingParams) -> Answer:
    """Apply the model's chat template; a prompt that leaves no room for the answer loses its end."""
    from headway.bench.answers import Reply

    room = (llm.info.max_model_len - params.max_tokens - 64) // 4  # characters; each is at most four bytes, or tokens

    def ask(texts: Sequence[str]) -> list[Reply]:
        done = llm.chat([[{"role": "user", "content": text[:room]}] for text in texts], params)
        first = [each.outputs[0] for each in done]
        return [
            Reply(each.prompt_tokens, len(answer.token_ids), answer.finish_reason)
            for each, answer in zip(done, first, strict=True)
        ]

    return ask
