"""`scripts/exactness`: prints one line per cell and exits 1 if a single token or bit differs. No reruns."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from exactness import all_cells, filler_prompts, run_cell
from headway.build import Loaded, load_model
from headway.config import EngineConfig
from headway.text.tokenizer import Tokenizer

PROMPTS = Path(__file__).parent / "data" / "prompts.txt"


def reference(loaded: Loaded, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers answers, from its own model class over the same dequantized weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**loaded.source.config, "eos_token_id": None})).eval()
    state = {name: torch.as_tensor(value.copy()) for name, value in loaded.source.tensors()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    model.tie_weights()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                min_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
            answers.append(out[0, len(prompt) :].tolist())
            print(f"\rreference {len(answers)}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/exactness", description=__doc__)
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "ref"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cells", type=int, default=48, help="only the first so many cells")
    args = parser.parse_args()
    loaded = load_model(EngineConfig.of(kernels=args.kernels))
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    lines = [line.replace("\\n", "\n") for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer.encode(line) for line in lines[: args.prompts]]
    expected = reference(loaded, prompts, args.tokens)
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
