"""What number formats cost in quality on a CUDA device: perplexity over a text, how often the likeliest token stays.

The text is cut into windows that are read side by side, token by token, by the executor that serves: every token but a
window's first is predicted from those before it. bfloat16 weights and KV are the measure. Run it by `headway bench
quality --device cuda --text FILE`, or by `python -m headway.bench.device_quality --model FILE --text FILE`.
"""

from __future__ import annotations

import argparse
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.backends.cuda import DTYPES, KV_DTYPES, open_device
from headway.bench.console import end, print_json
from headway.bench.quality import encode, read_text
from headway.bench.setup import ModelSetup, at_least_one
from headway.errors import ConfigError
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order
from headway.modelfile.source import ModelSource, open_model
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
    logits = executor.graphs.step.decoder.logits[: len(windows)]
    targets = torch.tensor(windows, device=logits.device)
    nats, best = [], []
    for position in range(length - 1):
        chunks = [Chunk(row, position, 1, Samples.TOKEN) for row in range(len(windows))]
        executor.submit(StepPlan(position, array("i"), chunks, joins if not position else ()))
        assert not executor.collect().failed
        fine = logits.double()
        nats.append(fine.logsumexp(1) - fine.gather(1, targets[:, position + 1 : position + 2]).squeeze(1))
        best.append(fine.argmax(1))
    return torch.stack(nats, 1), torch.stack(best, 1)


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One line: what a pair of formats made of the text, against bfloat16."""

    dtype: str
    kv_dtype: str
    perplexity: float
    change: float  # as a share
    standard_error: float  # of the change, from the differences token by token
    same_top1: float  # share of positions whose likeliest token is bfloat16's


def measure(source: ModelSource, ids: Sequence[int], window: int) -> Iterator[FormatRow]:
    """A row for each pair of formats; what is left of the text behind the last whole window is not read."""
    device = open_device()
    fix_order()
    windows = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
    if not windows:
        raise ConfigError(f"the text has {len(ids)} tokens and window is {window}; at least one window is needed")
    spec = read_config(source.config)
    launch = Launch(device.num_sms, device.has_dependent_launch)
    blocks = len(windows) * -(-window // 16)
    base: tuple[float, Tensor, Tensor] | None = None  # perplexity, likeliest tokens, nats
    for dtype, kv_dtype in _FORMATS:
        weights = load_weights(source.stored(), spec, dtype=DTYPES[dtype], device=device.device)
        sizes = Sizes(len(windows), blocks, window, 1024, kv_dtype=KV_DTYPES[kv_dtype])
        with torch.inference_mode():
            nats, best = read_windows(make_executor(spec, weights, sizes, launch), windows)
        found = math.exp(float(nats.mean()))
        base = base or (found, best, nats)
        differences = nats - base[2]
        error = float(differences.std()) / math.sqrt(differences.numel())
        yield FormatRow(dtype, kv_dtype, found, found / base[0] - 1, error, float((best == base[1]).float().mean()))


def run(setup: ModelSetup, *, text: Path, tokens: int = 20_000, window: int = 1024, as_json: bool = False) -> int:
    """Print a line per pair of formats over the first tokens of a text."""
    at_least_one(tokens=tokens - 1, window=window - 1)
    source = open_model(setup.config().model)
    return _show(measure(source, encode(source, read_text(text), tokens), window), as_json)


def _show(rows: Iterable[FormatRow], as_json: bool) -> int:
    kept = []
    for row in rows:
        kept.append(asdict(row))
        print(
            f"weights {row.dtype}, KV {row.kv_dtype}: perplexity {row.perplexity:.4f}, {row.change:+.2%} "
            f"(standard error {row.standard_error:.2%}); {row.same_top1:.2%} of likeliest tokens as in bfloat16",
            flush=True,
        )
    if as_json:
        print_json({"rows": kept})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=Path, help="as `headway bench quality` takes it")
    what.add_argument("--tokens", type=Path, help="a JSON list of token ids, read as a whole")
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    setup = ModelSetup(model=args.model)
    if args.text is not None:
        return run(setup, text=args.text, window=args.window)
    source = open_model(setup.config().model)
    return _show(measure(source, json.loads(args.tokens.read_text()), args.window), False)


if __name__ == "__main__":
    end(main)
