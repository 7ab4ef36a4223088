"""The production engine and scheduler over the CUDA executor: company, overlap and penalties change no answer."""

from __future__ import annotations

import pytest

from cuda_kit import LAUNCH, plain_weights, small_spec
from headway.bench.device import make_engine
from headway.engine.client import Submit
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.values.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

SPEC = small_spec(layers=1)
PROMPTS = ([7, 90, 3], [55, 21, 8, 101, 64, 2, 33, 17, 120, 9, 44, 71, 5, 66, 12, 99, 31, 28, 7], [4] * 9)
PARAMS = (
    SamplingParams(temperature=1.0, max_tokens=3),
    SamplingParams(temperature=0.8, max_tokens=3, repetition_penalty=1.3, top_k=20),
    SamplingParams(temperature=0.0, max_tokens=2, logprobs=2),
)


def answers(executor: CudaExecutor, ids: tuple[int, ...], depth: int) -> dict[int, tuple[int, ...]]:
    sizes = Sizes(num_rows=4, num_blocks=24, max_len=64, max_tokens=32, depth=depth)
    engine = make_engine(executor, SPEC, sizes, caching=True, target_itl_ms=None)
    for id in ids:
        engine.add(Submit(id, PROMPTS[id], PARAMS[id], seed=40 + id))
    found = {}
    while engine.has_work:
        for output in engine.step().finished:
            assert output.error is None, output.error
            if output.finish is not None:
                found[output.id] = tuple(output.tokens)
    assert engine.stats().blocks_free == sizes.num_blocks
    return found


def test_answers_together_and_overlapped_are_those_alone() -> None:
    executor = make_executor(SPEC, plain_weights(SPEC), Sizes(4, 24, 64, 32), LAUNCH)
    together = answers(executor, (0, 1, 2), depth=2)
    assert [len(together[id]) for id in range(3)] == [3, 3, 2]
    assert together == {id: answers(executor, (id,), depth=1)[id] for id in range(3)}
