"""What `bench kernels` says of a CUDA device: what a step must move, and how near a kernel comes to that."""

from __future__ import annotations

import json

import pytest
import torch

from cuda_kit import IS_CUDA, CudaDesk, plain_weights, small_spec
from headway.bench.device_kernels import against, folded, needs, run
from headway.bench.device_quality import read_windows
from headway.bench.limit import Machine
from tiny_models import logits_alone, tiny_decoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

SPEC = small_spec()


def test_every_matrix_is_read_once_and_multiplied_by_every_row() -> None:
    weights = plain_weights(SPEC)
    found = needs(SPEC, weights, rows=3, kv_bytes=700)
    names = ("qkv", "o", "gate_up", "down")
    in_layers = sum(weights[f"layers.{index}.{name}"].nbytes for index in range(SPEC.layers) for name in names)
    assert sum(found[name][0] for name in names) == in_layers
    assert sum(found[name][1] for name in names) == 2 * 3 * in_layers / 4
    assert found["head"] == (weights["embed"].nbytes, 2 * 3 * SPEC.vocab_size * SPEC.hidden)
    assert found["decode"] == (700, 0)


def test_a_kernels_limit_is_the_longer_of_moving_and_multiplying() -> None:
    wanted = {name: (100.0, 10.0) for name in ("qkv", "o", "gate_up", "down")}
    wanted |= {"head": (10.0, 500.0), "decode": (30.0, 0.0)}
    times = {"_gate_up": 4.0, "products": 20.0, "decode": 5.0, "fetch": 1.0}
    rows = {row.kernel: row for row in against(times, wanted, Machine(read_bytes=50.0, flops=100.0))}
    assert rows["_gate_up"].of_limit == pytest.approx(2 / 4)
    assert rows["products"].of_limit == pytest.approx((2 + 2 + 2 + 5) / 20), "what is not fused, the head too"
    assert rows["decode"].of_limit == pytest.approx(0.6 / 5)
    assert rows["fetch"].of_limit is None
    assert [row.kernel for row in rows.values()] == ["products", "decode", "_gate_up", "fetch"]
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_products_of_several_formats_are_one() -> None:
    assert folded({"_qkv": 1.0, "_gate_up": 2.0, "products": 4.0, "decode": 8.0}) == {"products": 7.0, "decode": 8.0}


def test_quality_is_read_from_the_logits_of_every_position() -> None:
    windows = [[7, 90, 3, 55], [21, 8, 101, 64]]
    desk = CudaDesk(small_spec(layers=1))
    nats, best = read_windows(desk.executor, windows)  # type: ignore[arg-type]
    assert nats.shape == best.shape == (2, 3)
    for line, tokens, likeliest in zip(nats, windows, best, strict=True):
        wanted = torch.log_softmax(logits_alone(tiny_decoder(desk.spec), tokens[:-1]).double(), -1)
        found = [-float(wanted[at, token]) for at, token in enumerate(tokens[1:])]
        assert line.tolist() == pytest.approx(found, abs=1e-3)
        assert likeliest.tolist() == wanted.argmax(-1).tolist()


@pytest.mark.skipif(not IS_CUDA, reason="times are a device's")
def test_every_kernel_of_a_step_has_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2-135m", as_json=True) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    for case in record["cases"]:
        kernels = {row["kernel"]: row for row in case["kernels"]}
        assert {"decode", "products", "parts", "publish"} <= set(kernels)
        assert sum(row["share"] for row in kernels.values()) == pytest.approx(1)
        assert 0 < kernels["decode"]["of_limit"] < 1.1
        assert 0 < case["of_limit"] < 1
