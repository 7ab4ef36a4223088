"""`scripts/exactness`: prints one line per policy and cell and exits 1 if a single token or bit differs. No reruns."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from exactness import Cell, Outcome, all_cells, covering_cells, filler_prompts, read_prompts, reference, run_cell
from exactness_rules import PLAIN, Rules, all_rules, find_rules
from headway.backends.cpu import LoadedCpu, load_model
from headway.cli.terminal import progress
from headway.config import EngineConfig
from headway.text.tokenizer import Tokenizer

CELLS = list(all_cells())
ABOUT = f"""Greedy answers of the embedded model against those of transformers, and every logit bit between all runs.

A cell is a way of running it: alone or in a batch, chunks of the prompt, cached prompts, forced preemptions, depth.
There are {len(CELLS)}. Under fcfs all of them are run, with a slot for every request. Under any other policy slots are
few, requests differ in what they ask for, and six cells with other requests are run in which any two settings meet; the
half- policies give every request a slot and half of the memory that is needed. --cells chooses others, for instance to
go on after an interruption: bits are then compared among those that are run."""
Job = tuple[Rules, Cell]


def parse_cells(text: str) -> list[Cell]:
    """The cells of a text like 1-12,40. ValueError if it is none."""
    chosen: list[Cell] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            numbers = range(int(first), int(last or first) + 1)
        except ValueError:
            numbers = range(0)
        if not numbers or numbers[0] < 1 or numbers[-1] > len(CELLS):
            raise ValueError(f"cells are {text!r}; allowed: numbers from 1 to {len(CELLS)}, such as 1-12,40")
        chosen += [CELLS[number - 1] for number in numbers]
    return chosen


def choose(policies: str, cells: str | None) -> list[Job]:
    """What is run, in this order. ValueError if a name or a number means nothing."""
    jobs: list[Job] = []
    for rules in find_rules(policies):
        usual = CELLS if rules is PLAIN else covering_cells()
        jobs += [(rules, cell) for cell in (parse_cells(cells) if cells else usual)]
    return jobs


def weight(cell: Cell, num_prompts: int) -> float:
    """How long a cell takes, in passes over a full batch; alone, a prompt takes about a third of one."""
    return (2 if cell.cache else 1) * (1.0 if cell.company else num_prompts / 3)


@dataclass(slots=True)
class Clock:
    """How long the rest will take, by what the cells so far took."""

    to_come: float
    began: float = field(default_factory=time.monotonic)
    done: float = 0.0

    def left(self, more: float) -> str:
        self.done += more
        elapsed = time.monotonic() - self.began
        minutes = elapsed * (self.to_come - self.done) / self.done / 60
        return f"about {minutes:.0f} min left of {elapsed / 60 + minutes:.0f}"


def describe(rules: Rules, cell: Cell, outcome: Outcome, same: int, total: int) -> str:
    stats, recorder, order = outcome.stats, outcome.recorder, "own" if outcome.is_reordered else "fcfs"
    return (
        f"{rules.name:14}  cell {CELLS.index(cell) + 1:2}  {cell}  tokens {same}/{total}  "
        f"logit rows {recorder.num_rows} differing {len(recorder.mismatches)}  preemptions {stats.preemptions} "
        f"(by priority {recorder.num_by_priority}, swapped {stats.swaps})  paused {recorder.num_paused}  order {order}"
    )


def run(jobs: Sequence[Job], loaded: LoadedCpu, prompts: Sequence[Sequence[int]], expected: list[list[int]]) -> int:
    """How many cells differ in a token or a bit."""
    fillers = filler_prompts(loaded.spec.vocab_size)
    digests: dict[bytes, bytes] = {}
    clock = Clock(sum(weight(cell, len(prompts)) for _, cell in jobs))
    num_tokens, num_bad, num_run = len(expected[0]), 0, 0
    with progress("cells", len(jobs)) as bar:
        for done, (rules, cell) in enumerate(jobs, 1):
            began = time.monotonic()
            outcome = run_cell(cell, loaded, prompts, num_tokens, digests, fillers, rules)
            pairs = zip(outcome.answers, expected, strict=True)
            same = sum(a == b for answer, want in pairs for a, b in zip(answer, want, strict=True))
            total = len(prompts) * num_tokens
            num_bad += same != total or bool(outcome.recorder.mismatches)
            num_run += outcome.stats.tokens_generated
            line = describe(rules, cell, outcome, same, total)
            left = clock.left(weight(cell, len(prompts)))
            bar.write(f"{line}  {time.monotonic() - began:.0f} s  {left}")
            bar.update(done, num_run)
    return num_bad


@contextmanager
def counting(total: int) -> Iterator[Callable[[int], None]]:
    with progress("reference answers", total) as bar:
        yield lambda done: bar.update(done, 0)


def arguments() -> tuple[argparse.Namespace, list[Job]]:
    parser = argparse.ArgumentParser(
        prog="scripts/exactness", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(rules.name for rules in all_rules())
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "ref"))
    parser.add_argument("--prompts", type=int, default=20, choices=range(1, 21), metavar="1-20")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; 12 or more")
    parser.add_argument("--policies", default="fcfs", help=f"all, or some with commas: {names}")
    parser.add_argument("--cells", help=f"numbers from 1 to {len(CELLS)}, such as 1-12,40, for each policy")
    args = parser.parse_args()
    if args.tokens < 12:  # with fewer no running request is left to preempt when the second wave arrives
        parser.error(f"tokens are {args.tokens}; allowed: 12 or more")
    try:
        return args, choose(args.policies, args.cells)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    args, jobs = arguments()
    loaded = load_model(EngineConfig.of(kernels=args.kernels, dtype="float32"))
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    prompts = [tokenizer.encode(text) for text in read_prompts()[: args.prompts]]
    print(f"kernels {loaded.device.kernels.name}, {len(prompts)} prompts x {args.tokens} tokens, threads "
          f"{loaded.device.threads}, torch {torch.__version__}; {len(jobs)} cells", flush=True)  # fmt: skip
    with counting(len(prompts)) as count:
        expected = reference(loaded.source.config, dict(loaded.source.tensors()), prompts, args.tokens, count)
    num_bad = run(jobs, loaded, prompts, expected)
    print(f"{'FAILED: ' + str(num_bad) + ' cells differ' if num_bad else 'all cells identical'}")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
