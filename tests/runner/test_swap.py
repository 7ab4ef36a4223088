"""Preempted requests whose KV goes to host memory and comes back: the same tokens as without any pressure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headway.backends.cpu import CpuDevice, LoadedCpu
from headway.build import build_engine
from headway.config import CacheConfig, EngineConfig, SchedulerConfig
from headway.control.costs import CostModel, CostWeights
from headway.engine.client import Output, Stats, Submit
from headway.kernels.ops import KernelSet
from headway.runner.memory import GIB
from headway.values.params import SamplingParams
from tiny_models import kernel_sets, tiny_decoder, tiny_spec

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 4 * i)] for i in range(1, 7)]
PLENTY, SCARCE = 400, 30  # blocks of 4 tokens; six requests grow to 60 each, so half of what they need
NUM_TOKENS = 40
CHEAP = CostWeights(base=1e-3, tokens=1e-3, copies=1e-6)  # copies; else a model this small would mostly compute


def _loaded(kernels: KernelSet) -> LoadedCpu:
    spec = tiny_spec()
    source = SimpleNamespace(name="tiny", digest="tiny", eos_ids=(), config={}, sampling={})
    device = CpuDevice("float32", kernels, 1, lambda: 2**33)
    return LoadedCpu(source, spec, device, tiny_decoder(spec, kernels))  # type: ignore[arg-type]


def _run(
    loaded: LoadedCpu,
    num_blocks: int,
    *,
    kv_dtype: str = "float32",
    depth: int = 1,
    swap_space_gb: float = 0.0,
    caching: bool = False,
    weights: CostWeights | None = None,
    debug_kv: bool = False,
) -> tuple[dict[int, Output], Stats]:
    """What became of each request; `weights` are what steps are said to cost."""
    config = EngineConfig(
        cache=CacheConfig(
            block_size=4, num_blocks=num_blocks, kv_dtype=kv_dtype, prefix_caching=caching, debug_kv=debug_kv
        ),
        scheduler=SchedulerConfig(depth=depth, swap_space_gb=swap_space_gb, speculation="off"),
    )
    engine = build_engine(config, loaded, keeps_tokens=True)
    if weights is not None:
        engine.scheduler.state.costs = CostModel(weights)
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True),
    ]
    try:
        for id, prompt in enumerate(PROMPTS):
            engine.add(Submit(id, prompt, params[id % 2], seed=id))
        ended: dict[int, Output] = {}
        while engine.has_work:
            for output in engine.step().finished:
                assert output.error is None, output.error
                ended[output.id] = output
        assert engine.scheduler.state.ledger.host.available == engine.scheduler.state.ledger.host.num_blocks
        return ended, engine.stats()
    finally:
        engine.close()


def _tokens(ended: dict[int, Output]) -> list[list[int]]:
    return [list(ended[id].tokens) for id in range(len(PROMPTS))]


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
@pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)
def test_swapped_requests_get_the_tokens_of_the_run_without_pressure(
    kernels: KernelSet, kv_dtype: str, depth: int, caching: bool
) -> None:
    loaded = _loaded(kernels)
    plenty, stats = _run(loaded, PLENTY, kv_dtype=kv_dtype, depth=depth, caching=caching)
    assert stats.preemptions == 0
    swapped, stats = _run(
        loaded, SCARCE, kv_dtype=kv_dtype, depth=depth, caching=caching, swap_space_gb=0.01, weights=CHEAP
    )
    assert stats.preemptions == stats.swaps > 2
    assert stats.block_copies > 2 * stats.swaps
    assert _tokens(swapped) == _tokens(plenty)
    assert stats.tokens_recomputed == 0


def test_without_host_memory_the_same_run_computes_again() -> None:
    loaded = _loaded(kernel_sets()[0])
    plenty, _ = _run(loaded, PLENTY)
    scarce, stats = _run(loaded, SCARCE)
    assert (stats.swaps, stats.preemptions > 2) == (0, True)
    assert stats.tokens_recomputed == sum(output.tokens_recomputed for output in scarce.values()) > 0
    assert _tokens(scarce) == _tokens(plenty)


def test_copies_that_cost_more_than_computing_are_not_made() -> None:
    loaded = _loaded(kernel_sets()[0])
    ended, stats = _run(loaded, SCARCE, swap_space_gb=0.01, weights=CHEAP._replace(copies=1.0))
    assert (stats.swaps, stats.preemptions > 2) == (0, True)
    assert _tokens(ended) == _tokens(_run(loaded, PLENTY)[0])


def test_computing_that_was_never_seen_is_not_free() -> None:
    _, stats = _run(_loaded(kernel_sets()[0]), SCARCE, swap_space_gb=0.01, weights=CostWeights(base=1e-3, copies=1.0))
    assert stats.swaps == stats.preemptions > 2


def test_what_steps_were_seen_to_cost_decides_in_the_end() -> None:
    ended, stats = _run(_loaded(kernel_sets()[0]), SCARCE, swap_space_gb=0.01)
    assert stats.swaps > 0  # the first copies are made to see what one costs
    assert _tokens(ended) == _tokens(_run(_loaded(kernel_sets()[0]), PLENTY)[0])


def test_host_memory_that_is_full_leaves_the_others_to_be_computed_again() -> None:
    loaded = _loaded(kernel_sets()[0])
    spec = loaded.spec
    block_bytes = spec.layers * 2 * 4 * spec.kv_heads * spec.head_dim * 4
    # Room for one request at a time at most, while two or three are out.
    ended, stats = _run(loaded, SCARCE // 2 + 4, swap_space_gb=12 * block_bytes / GIB, weights=CHEAP)
    assert 0 < stats.swaps < stats.preemptions
    assert _tokens(ended) == _tokens(_run(loaded, PLENTY)[0])
