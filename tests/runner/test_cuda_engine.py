"""The production engine and scheduler over the CUDA executor: other rows, overlap and penalties change no answer."""

from __future__ import annotations

import pytest

from cuda_kit import IS_CUDA, LAUNCH, plain_weights, small_spec
from headway.bench.device import make_engine
from headway.engine.client import Submit
from headway.engine.speculating import Speculation
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes
from headway.values.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

SPEC = small_spec(layers=1)
PROMPTS = ([7, 90, 3], [55, 21, 8, 101, 64, 2, 33, 17, 120, 9, 44, 71, 5, 66, 12, 99, 31, 28, 7], [4] * 9)
PARAMS = (
    SamplingParams(temperature=1.0, max_tokens=3),
    SamplingParams(temperature=0.8, max_tokens=3, repetition_penalty=1.3, top_k=20),
    SamplingParams(temperature=0.0, max_tokens=2, logprobs=2),
)


class FreeTokens(VerifyTimes):
    """Draft tokens cost nothing, so that as many as there are guesses are verified."""

    def table(self) -> list[float]:
        return [0.0, *[1.0] * MOST_TOKENS]


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


LENGTH = 90 if IS_CUDA else 14
REPEATING = [7, 90, 3, 55] * 3
GUESSED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH, logit_bias={7: 6.0, 90: 5.0}),
    "sampled": SamplingParams(temperature=0.4, top_k=3, max_tokens=LENGTH, logprobs=1, logit_bias={3: 6.0, 90: 5.5}),
    "penalties": SamplingParams(temperature=0.5, frequency_penalty=-0.5, max_tokens=LENGTH, stop_token_ids=(31,)),
}


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_change_no_token_of_any_row(depth: int) -> None:
    executor = make_executor(SPEC, plain_weights(SPEC), Sizes(8, 40, 128, 64), LAUNCH)
    sizes = Sizes(num_rows=8, num_blocks=40, max_len=128, max_tokens=64, depth=depth)

    def run(names: list[str], *, guesses: bool) -> tuple[dict[str, tuple[int, ...]], int]:
        engine = make_engine(executor, SPEC, sizes, caching=True, target_itl_ms=None)
        if guesses:
            engine._speculation = Speculation(
                engine.scheduler, most=4, depth=depth, takes_penalties=False, times=FreeTokens()
            )
        for id, name in enumerate(names):
            engine.add(Submit(id, REPEATING, GUESSED[name], seed=len(name)))
        found = {}
        while engine.has_work:
            for output in engine.step().finished:
                assert output.error is None, output.error
                found[names[output.id]] = tuple(output.tokens)
        stats = engine.stats()
        assert stats.blocks_free == sizes.num_blocks
        assert stats.tokens_drafted >= stats.tokens_accepted
        return found, stats.tokens_accepted

    together, num_accepted = run(list(GUESSED), guesses=True)
    assert num_accepted > 3, "nothing was guessed: the test shows nothing"
    for name in GUESSED:
        assert run([name], guesses=False)[0][name] == together[name]
