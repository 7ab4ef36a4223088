"""Blocks that go to host memory by way of the outbox and come back: whatever is in flight, they are what was sent."""

from __future__ import annotations

import random

import pytest
import torch

from cuda_kit import DEVICE, IS_CUDA, CudaDesk, plain_weights, small_spec
from headway.kernels.cuda.ops import Heads
from headway.runner.cuda import outbox
from headway.runner.cuda.kvstore import CudaKVStore
from headway.values.plan import BlockCopy, BlockRef, Tier

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

HEADS = Heads(4, 2, 16, 16)
NUM_BLOCKS, NUM_HOST = 12, 9


def store() -> CudaKVStore:
    sizes = {"layers": 2, "num_blocks": NUM_BLOCKS, "host_blocks": NUM_HOST}
    return CudaKVStore(**sizes, heads=HEADS, dtype=torch.float32, device=DEVICE)  # type: ignore[arg-type]


def put(kv: CudaKVStore, block: int, number: float) -> None:
    for layer in kv.layers:
        layer.keys[block] = number
        layer.values[block] = -number


def holds(kv: CudaKVStore, block: int, number: float) -> bool:
    return all(bool((x.keys[block] == number).all() and (x.values[block] == -number).all()) for x in kv.layers)


def copy(src: tuple[Tier, int], dst: tuple[Tier, int]) -> BlockCopy:
    return BlockCopy(BlockRef(*src), BlockRef(*dst))


@pytest.mark.parametrize("places", [1, 3, NUM_HOST])
def test_blocks_come_back_as_they_were_sent(monkeypatch: pytest.MonkeyPatch, places: int) -> None:
    block_bytes = 2 * 2 * HEADS.block_size * HEADS.kv * HEADS.dim * 4
    monkeypatch.setattr(outbox, "MOST_BYTES", places * block_bytes)
    kv, rng = store(), random.Random(places)
    assert kv._to_host().num_places == places
    device, host, held = [0.0] * NUM_BLOCKS, [0.0] * NUM_HOST, []
    for number in range(1, 40 if not IS_CUDA else 400):
        block = rng.randrange(NUM_BLOCKS)
        device[block] = float(number)
        put(kv, block, device[block])
        copies = []
        for _ in range(rng.randint(1, 6)):
            a, b = rng.randrange(NUM_BLOCKS), rng.randrange(NUM_HOST)
            if rng.random() < 0.6:
                copies.append(copy((Tier.DEVICE, a), (Tier.HOST, b)))
                host[b] = device[a]
            else:
                copies.append(copy((Tier.HOST, b), (Tier.DEVICE, a)))
                device[a] = host[b]
        held.append(kv.copy(copies))
        if rng.random() < 0.5:
            kv.send()
    assert all(holds(kv, block, number) for block, number in enumerate(device))


@pytest.mark.skipif(not IS_CUDA, reason="the clock is the device's")
def test_a_step_takes_the_time_of_blocks_that_come_back_and_not_of_those_that_leave() -> None:
    spec = small_spec(layers=16, hidden=64, intermediate=64, heads=8, kv_heads=8, head_dim=128)
    desk = CudaDesk(spec, num_blocks=64, host_blocks=64, weights=plain_weights(spec, dtype=torch.bfloat16))
    pairs = [(BlockRef(Tier.DEVICE, i), BlockRef(Tier.HOST, i)) for i in range(64)]
    num_bytes = 64 * 16 * desk.executor.kv_bytes_per_token  # type: ignore[attr-defined]
    assert num_bytes == 64 << 20
    times: dict[str, list[float]] = {"none": [], "out": [], "in": []}
    for _ in range(5):
        times["none"].append(desk.step().elapsed)
        times["out"].append(desk.step(copies=[BlockCopy(a, b) for a, b in pairs]).elapsed)
        torch.cuda.synchronize()
        times["in"].append(desk.step(copies=[BlockCopy(b, a) for a, b in pairs]).elapsed)
    none, out, back = (sorted(values)[2] for values in times.values())
    on_the_bus = num_bytes / 100e9  # of no bus that there is
    assert back - none > on_the_bus
    assert out - none < on_the_bus
