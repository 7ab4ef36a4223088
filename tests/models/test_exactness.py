"""A token's logits are the same bits alone, in any batch, after any chunking and after a cache hit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kernels.ops import KernelSet
from headway.models.spec import ModelSpec
from tiny_models import Driver, kernel_sets, logits_alone, run_in_random_company, tiny_decoder, tiny_spec

SPECS = {
    "odd sizes": tiny_spec(),
    "one head per group": tiny_spec(heads=3, kv_heads=3, head_dim=16, hidden=33, tie_embeddings=False),
    "biases": tiny_spec(family="qwen2", qkv_bias=True, hidden=64, intermediate=96, heads=4, head_dim=16),
    "head norms": tiny_spec(family="qwen3", qk_norm=True, heads=8, kv_heads=1, head_dim=32),
    "windows and caps": tiny_spec(
        family="gemma3",
        qk_norm=True,
        norms="around",
        activation="gelu_tanh",
        windows=(20, 0),
        window_rope_theta=100.0,
        attn_cap=2.0,
        logit_cap=3.0,
        embed_scale=2.0,
    ),
    "norms behind": tiny_spec(family="olmo2", qk_norm=True, qk_norm_is_wide=True, norms="behind"),
    "part of a head rotates": tiny_spec(rotary_dim=4, residual_scale=0.5, logit_scale=0.25, attn_scale=0.3),
    "experts": tiny_spec(family="mixtral", experts=5, experts_per_token=2, windows=(70, 70)),
}
SETS = {kernels.name: kernels for kernels in kernel_sets()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_prompts(rng: random.Random, count: int, longest: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_random_batches_and_chunking_change_no_bit(spec: ModelSpec, kernels: KernelSet) -> None:
    decoder = tiny_decoder(spec, kernels)

    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 2**32), block_size=st.sampled_from((1, 5, 16, 64)), count=st.integers(1, 9))
    def check(seed: int, block_size: int, count: int) -> None:
        prompts = random_prompts(random.Random(seed), count, 150, spec.vocab_size)
        together = run_in_random_company(decoder, prompts, block_size, seed)
        for tokens, logits in zip(prompts, together, strict=True):
            assert torch.isfinite(logits).all()
            assert torch.equal(logits, logits_alone(decoder, tokens))

    check()


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64, 129])
def test_every_chunk_size_gives_the_same_bits(chunk: int, kernels: KernelSet) -> None:
    decoder = tiny_decoder(kernels=kernels)
    tokens = [random.Random(5).randrange(131) for _ in range(300)]
    driver = Driver(decoder)
    seq = driver.add(tokens)
    while seq.done < len(tokens):
        driver.step([(seq, min(chunk, len(tokens) - seq.done))])
    assert torch.equal(torch.stack(seq.logits), logits_alone(decoder, tokens))


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
def test_cache_hit_gives_the_same_bits(kernels: KernelSet) -> None:
    decoder = tiny_decoder(kernels=kernels)
    rng = random.Random(3)
    first, other = random_prompts(rng, 2, 1, 131)
    first = [rng.randrange(131) for _ in range(200)]
    other = first[:144] + [rng.randrange(131) for _ in range(30)]
    driver = Driver(decoder)
    giver = driver.add(first)
    driver.step([(giver, 77)])
    driver.step([(giver, 123)])
    taker = driver.add(other, shared=giver, hit=144)
    driver.step([(taker, 29)])
    driver.step([(taker, 1)])
    assert torch.equal(torch.stack(taker.logits), logits_alone(decoder, other)[144:])


@pytest.mark.parametrize("threads", [2, 3])
def test_number_of_threads_does_not_break_equality(threads: int) -> None:
    torch.set_num_threads(threads)
    # Wide enough that torch really splits the work.
    decoder = tiny_decoder(tiny_spec(hidden=320, intermediate=1000, heads=5, kv_heads=1, head_dim=64))
    prompts = random_prompts(random.Random(threads), 12, 100, 131)
    for tokens, logits in zip(prompts, run_in_random_company(decoder, prompts, 16, threads), strict=True):
        assert torch.equal(logits, logits_alone(decoder, tokens))


SCRIPT = """
import random, torch
from tiny_models import logits_alone, run_in_random_company, tiny_decoder
torch.set_num_threads(1)
decoder = tiny_decoder()
prompts = [[random.Random(i).randrange(131) for _ in range(20 * i + 1)] for i in range(9)]
for tokens, logits in zip(prompts, run_in_random_company(decoder, prompts, 16, 1), strict=True):
    assert torch.equal(logits, logits_alone(decoder, tokens))
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("level", ["avx2", "default"])
def test_other_instruction_sets_keep_equality(level: str) -> None:
    # Both torch's own loops and the library below its matrix products are held down to that level.
    mkl = {"avx2": "AVX2", "default": "SSE4_2"}[level]
    paths = os.pathsep.join((str(Path(__file__).parents[1] / "support"), *filter(None, sys.path)))
    env = {**os.environ, "ATEN_CPU_CAPABILITY": level, "MKL_ENABLE_INSTRUCTIONS": mkl, "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().lower() == level


def test_a_row_of_nan_stays_alone() -> None:
    decoder = tiny_decoder()
    driver = Driver(decoder)
    good, bad = driver.add([1, 2, 3, 4, 5]), driver.add([6, 7, 8])
    driver.step([(good, 4), (bad, 2)])
    driver.kv[:, :, bad.table[0]] = float("nan")
    driver.step([(bad, 1), (good, 1)])
    assert torch.isnan(bad.logits[-1]).all()
    assert torch.equal(torch.stack(good.logits), logits_alone(decoder, good.tokens))
