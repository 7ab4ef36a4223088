"""Whether a CUDA device computes in float32 what the CPU does: the CPU's tokens forced, the largest logit compared.

    python tools/gpu_forced.py record FILE                on any machine: prompts, the CPU's tokens, how sure it was
    python tools/gpu_forced.py check FILE --model GGUF    on a machine with a device

Positions may differ where the CPU's two largest logits are closer than 1e-3; each such is listed.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from pathlib import Path

CLOSE = 1e-3
NUM_TOKENS = 64
ROOT = Path(__file__).resolve().parent.parent


def record(path: Path, model: str) -> int:
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tools")]
    from exactness import read_prompts
    from headway.backends.cpu import load_model
    from headway.config import EngineConfig
    from headway.llm import LLM
    from headway.values.params import SamplingParams
    from tiny_models import logits_alone

    config = EngineConfig.of(model=model, dtype="float32", kv_dtype="float32")
    with LLM(config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        done = llm.generate(read_prompts(), params)
    decoder = load_model(config).decoder
    entries = []
    for completion in done:
        prompt, answer = completion.prompt_tokens, completion.outputs[0].token_ids
        tokens = [*prompt, *answer]
        top = logits_alone(decoder, tokens)[len(prompt) - 1 : -1].topk(2)  # type: ignore[arg-type]
        itls = (top.values[:, 0] - top.values[:, 1]).tolist()
        assert top.indices[:, 0].tolist() == answer, "the CPU disagrees with itself"
        entries.append({"num_prompt": len(prompt), "tokens": tokens, "itls": itls})
    path.write_text(json.dumps(entries))
    return 0


def check(path: Path, model: str) -> int:
    import torch

    from headway.backends.cuda import open_device
    from headway.kernels.cuda.launch import Launch
    from headway.kernels.cuda.products import fix_order
    from headway.modelfile.cache import ModelCache, default_root
    from headway.modelfile.source import resolve
    from headway.models.registry import read_config
    from headway.runner.cuda.assemble import Sizes, make_executor
    from headway.runner.cuda.weights import load_weights
    from headway.values.params import SamplingParams
    from headway.values.plan import Chunk, Join, Samples, StepPlan

    entries = json.loads(path.read_text())
    device = open_device()
    fix_order()
    source = resolve(model, ModelCache(default_root()))
    spec = read_config(source.config)
    weights = load_weights(source.tensors(), spec, dtype=torch.float32, device=device.device)
    sizes = Sizes(len(entries), 20 * len(entries), 320, 2048)
    executor = make_executor(spec, weights, sizes, Launch(device.num_sms, device.has_dependent_launch))
    greedy = SamplingParams(temperature=0.0)
    joins = [
        Join(row, row, 0, e["tokens"], e["num_prompt"], range(20 * row, 20 * row + 20), 0, greedy, 0, frozenset())
        for row, e in enumerate(entries)
    ]
    found: list[list[int]] = []
    for k in range(NUM_TOKENS):
        # Each step computes one more forced token of every row and looks at the logits behind it.
        starts = [0 if not k else e["num_prompt"] + k - 1 for e in entries]
        counts = [e["num_prompt"] if not k else 1 for e in entries]
        chunks = [Chunk(row, start, counts[row], Samples.TOKEN) for row, start in enumerate(starts)]
        executor.submit(StepPlan(k, array("i"), chunks, joins if not k else ()))
        result = executor.collect()
        assert not result.failed, result.failed
        found.append(list(result.tokens))
    executor.submit(StepPlan(NUM_TOKENS, array("i"), joins=joins))
    executor.collect()
    faults = equal = close = 0
    for row, e in enumerate(entries):
        for k, itl in enumerate(e["itls"]):
            is_equal = found[k][row] == e["tokens"][e["num_prompt"] + k]
            equal += is_equal
            close += not is_equal and itl < CLOSE
            faults += not is_equal and itl >= CLOSE
            if not is_equal:
                print(f"prompt {row}, token {k}: {found[k][row]}, the CPU's two largest are {itl:.2e} apart")
    total = NUM_TOKENS * len(entries)
    print(f"{equal} of {total} positions agree; {close} differ where the CPU is unsure, {faults} elsewhere")
    return int(faults > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    return record(args.file, args.model) if args.what == "record" else check(args.file, args.model)


if __name__ == "__main__":
    sys.exit(main())
