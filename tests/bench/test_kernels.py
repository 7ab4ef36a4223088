"""`bench kernels` on a tiny model: every shape, row count and format is there, and the shares are shares of a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.backends.cpu import load_model
from headway.bench import attention, kernels
from headway.bench.kernels import shapes
from headway.bench.limit import Matrices
from headway.bench.setup import ModelSetup
from headway.cli.main import main
from headway.kernels import ref
from headway.runner.kvstore import KVStore
from tiny_models import tiny_spec


def test_kernels_bench_has_every_cell(setup: ModelSetup, last_line: Callable[[], dict[str, Any]]) -> None:
    spec = load_model(setup.config()).spec
    assert kernels.run(setup, rows=(1, 3), as_json=True) == 0
    record = last_line()
    cells = {(row["matrix"], row["num_in"], row["num_out"], row["rows"]) for row in record["linear"]}
    assert cells == {(name, *shape, rows) for name, shape in shapes(spec).items() for rows in (1, 3)}
    assert record["peak_gflops"].keys() == {"float32"}
    for row in record["linear"]:
        assert row["gflops"] > 0
        assert row["torch_gflops"] > 0
    wanted = [(kv, *case) for kv in ("float32", "fp16", "int8") for case in attention.CASES]
    assert [(row["kv_dtype"], row["rows"], row["new"], row["context"]) for row in record["attention"]] == wanted


def test_kernels_bench_measures_every_format_it_has_by_default(
    flags: list[str], last_line: Callable[[], dict[str, Any]]
) -> None:
    chosen = [flag for flag in flags if not flag.startswith("--dtype")]
    assert main(["bench", "kernels", "--kernels", "ref", "--json", *chosen], {}) == 0
    record = last_line()
    assert record["kernels"].startswith("ref")
    assert {row["dtype"] for row in record["linear"]} == record["peak_gflops"].keys() >= {"float32"}


def test_shapes_are_all_the_weights_of_a_step() -> None:
    spec = tiny_spec()
    sizes = {name: num_in * num_out for name, (num_in, num_out) in shapes(spec).items()}
    head = sizes.pop("head")
    matrices = Matrices.of(spec, "float32")
    assert (spec.layers * sum(sizes.values()), head) == (matrices.layers, matrices.head)


def test_attention_batches_read_only_their_own_rows() -> None:
    spec, kernel_set = tiny_spec(), ref.load()
    kv = KVStore(layers=1, num_blocks=6, block_size=16, kv_heads=spec.kv_heads, head_dim=spec.head_dim).data[0]
    rng = np.random.default_rng(0)
    kv[...] = rng.standard_normal(kv.shape)
    batch = attention.make_batch(rows=3, new=2, context=20)
    assert batch.positions.tolist() == [18, 19] * 3
    assert batch.slot_map.tolist() == [18, 19, 50, 51, 82, 83]
    q = rng.standard_normal((6, spec.heads, spec.head_dim), np.float32)
    before = kernel_set.attention(q, kv, batch, 0.3)
    kv[:, batch.tables[1]] = 7.0
    after = kernel_set.attention(q, kv, batch, 0.3)
    changed = (before != after).reshape(6, -1).any(1)
    assert changed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "tpu"], "device is 'tpu'; allowed: cpu, cuda"),
        (["--model-shape", "llama-3.2-1b"], "--model-shape is for --device cuda"),
        (["--device", "cuda", "--threads", "2"], "--threads: not for --device cuda"),
    ],
)
def test_kernels_bench_refuses_what_the_device_does_not_take(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *given], {}) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_kernels_bench_says_why_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"], {}) == 2
    assert "device is 'cuda', but" in capsys.readouterr().err
