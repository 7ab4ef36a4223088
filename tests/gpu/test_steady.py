"""A device that has recorded all its buckets: from then on no step allocates, compiles or captures anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton import knobs

from cuda_kit import DEVICE, IS_CUDA, LAUNCH
from headway.bench.device import make_engine
from headway.control.costs import CostModel, CostWeights
from headway.core.preemption import preempt
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.kernels.cuda.products import fix_order
from headway.models.shapes import shape_of
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="a device's own")

SIZES = Sizes(num_rows=40, num_blocks=600, max_len=512, max_tokens=512, host_blocks=200)
KINDS = (
    SamplingParams(max_tokens=12, temperature=1.0),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.2, logprobs=3),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=20, top_p=0.9, logit_bias={5: 2.0}),
)


def drive(engine: Engine, num: int, *, is_special: bool) -> None:
    for id in range(num):
        params = KINDS[id % 3] if is_special else KINDS[0]
        engine.add(Submit(id, [(7 * id + i) % 40_000 for i in range(1 + 13 * (id % 25))], params, seed=id))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        running = list(engine.scheduler.state.rows.running())
        if running and steps % 3 == 0:
            preempt(engine.scheduler.state, running[steps % len(running)])


def test_once_all_is_recorded_steps_allocate_compile_and_capture_nothing() -> None:
    fix_order()
    spec = replace(shape_of("smollm2-135m"), layers=2, max_len=SIZES.max_len)
    executor = make_executor(spec, dummy_weights(spec, dtype=torch.bfloat16, device=DEVICE), SIZES, LAUNCH)
    while executor.prepare():
        pass
    recorded = executor.graphs.num_recorded
    assert recorded == len(set(executor.graphs.buckets()))
    compiled: list[object] = []

    def note(*, fn: object, **_: object) -> bool:
        compiled.append(fn)
        return False

    before = torch.cuda.memory_stats()
    knobs.runtime.jit_post_compile_hook = note
    try:
        for num, is_special in ((1, False), (40, False), (70, True)):
            engine = make_engine(executor, spec, SIZES, caching=False, target_itl_ms=None)
            engine.scheduler.state.costs = CostModel(CostWeights(base=1e-3, tokens=1e-3))  # copies are cheap
            drive(engine, num, is_special=is_special)
            stats = engine.stats()
        assert stats.swaps > 0
    finally:
        knobs.runtime.jit_post_compile_hook = None
    after = torch.cuda.memory_stats()
    assert not compiled
    assert executor.graphs.num_recorded == recorded
    for name in ("num_device_alloc", "allocation.all.allocated"):
        assert after[name] == before[name], name
