"""`scripts/exactness`: prints one line per cell and exits 1 if a single token or bit differs. No reruns."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from exactness import all_cells, filler_prompts, read_prompts, reference, run_cell
from headway.build import load_model
from headway.config import EngineConfig
from headway.text.tokenizer import Tokenizer


def show(done: int) -> None:
    print(f"\rreference answers: {done}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/exactness", description=__doc__)
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "ref"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cells", type=int, default=48, help="only the first so many cells")
    args = parser.parse_args()
    loaded = load_model(EngineConfig.of(kernels=args.kernels, dtype="float32"))
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    prompts = [tokenizer.encode(text) for text in read_prompts()[: args.prompts]]
    expected = reference(loaded.source.config, dict(loaded.source.tensors()), prompts, args.tokens, show)
    print(file=sys.stderr)
    fillers = filler_prompts(loaded.spec.vocab_size)
    digests: dict[bytes, bytes] = {}
    print(f"kernels {loaded.backend.kernels.name}, {len(prompts)} prompts x {args.tokens} tokens, threads "
          f"{loaded.backend.threads}, torch {torch.__version__}")  # fmt: skip
    bad = 0
    for cell in list(all_cells())[: args.cells]:
        began = time.monotonic()
        answers, recorder, preempted = run_cell(cell, loaded, prompts, args.tokens, digests, fillers)
        same = sum(
            a == b for answer, want in zip(answers, expected, strict=True) for a, b in zip(answer, want, strict=True)
        )
        total = len(prompts) * args.tokens
        bad += same != total or bool(recorder.mismatches)
        print(
            f"{cell}  tokens {same}/{total}  logit rows {recorder.num_rows} "
            f"differing {len(recorder.mismatches)}  preemptions {preempted}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
    print(f"{'FAILED: ' + str(bad) + ' cells differ' if bad else 'all cells identical'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
