"""What number formats cost in quality on a CUDA device: perplexity over a text, how often the likeliest token stays.

The text is cut into windows that are read side by side, token by token, by the executor that serves: every token but a
window's first is predicted from those before it. bfloat16 weights and KV are the measure. Run it by
`python -m headway.bench.device_quality --model FILE --tokens FILE`; the tokens are a JSON list.
"""

from __future__ import annotations

import argparse
import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headway.backends.cuda import DTYPES, KV_DTYPES, open_device
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order
from headway.modelfile.cache import ModelCache, default_root
from headway.modelfile.source import resolve
from headway.models.registry import read_config
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import load_weights
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Join, Samples, StepPlan

_FORMATS = (
    ("bfloat16", "bfloat16"),
    ("fp8", "bfloat16"),
    ("bfloat16", "fp8"),
    ("fp8", "fp8"),
    ("bfloat16", "int8"),
)


def read_windows(executor: CudaExecutor, windows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Minus the log probability of every token that came, and the likeliest one, [windows, length - 1]."""
    length = len(windows[0])
    each = -(-length // executor.capacity().block_size)
    params, none = SamplingParams(temperature=0.0), frozenset[int]()
    joins = [
        Join(row, row, 0, tokens, length, range(each * row, each * (row + 1)), 0, params, 0, none)
        for row, tokens in enumerate(windows)
    ]
    targets = torch.tensor(windows, device="cuda")
    logits = executor.graphs.step.decoder.logits[: len(windows)]
    nats, best = [], []
    for position in range(length - 1):
        chunks = [Chunk(row, position, 1, Samples.TOKEN) for row in range(len(windows))]
        executor.submit(StepPlan(position, array("i"), chunks, joins if not position else ()))
        assert not executor.collect().failed
        fine = logits.double()
        nats.append(fine.logsumexp(1) - fine.gather(1, targets[:, position + 1 : position + 2]).squeeze(1))
        best.append(fine.argmax(1))
    return torch.stack(nats, 1), torch.stack(best, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    device = open_device()
    fix_order()
    tokens = json.loads(args.tokens.read_text())
    windows = [tokens[at : at + args.window] for at in range(0, len(tokens) - args.window + 1, args.window)]
    source = resolve(args.model, ModelCache(default_root()))
    spec = read_config(source.config)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    blocks = len(windows) * -(-args.window // 16)
    measure: tuple[float, Tensor, Tensor] | None = None  # perplexity, likeliest tokens, nats
    for dtype, kv_dtype in _FORMATS:
        weights = load_weights(source.stored(), spec, dtype=DTYPES[dtype], device=device.device)
        sizes = Sizes(len(windows), blocks, args.window, 1024, kv_dtype=KV_DTYPES[kv_dtype])
        with torch.inference_mode():
            nats, best = read_windows(make_executor(spec, weights, sizes, launch), windows)
        found = math.exp(float(nats.mean()))
        measure = measure or (found, best, nats)
        same = float((best == measure[1]).float().mean())
        differences = nats - measure[2]
        error = float(differences.std()) / math.sqrt(differences.numel())
        print(
            f"weights {dtype}, KV {kv_dtype}: perplexity {found:.4f}, {found / measure[0] - 1:+.2%} "
            f"(standard error {error:.2%}); "
            f"{same:.2%} of {best.numel()} likeliest tokens as in bfloat16",
            flush=True,
        )


if __name__ == "__main__":
    main()
