"""Draft tokens on a device: a step takes those that are right, and rows go on as without any."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_kit import IS_CUDA, CudaDesk, small_spec
from headway.engine.executor import Late
from headway.runner.cuda.drafts import SampledEntry, count_right, samples_of, shortened
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Samples, StepResult, TokenLogprob

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PROMPT = [7, 90, 3, 55, 21, 8, 101]
OTHER = [64, 2, 33]
NUM = len(PROMPT)
GREEDY = SamplingParams(temperature=0.0)
CASES = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0),
    "special": SamplingParams(temperature=0.9, top_k=40, logprobs=2, logit_bias={5: 1.5}),
    "least": SamplingParams(temperature=0.0, min_tokens=4, logprobs=0),
}
STOPS = frozenset({1})


def desk(num_rows: int = 8) -> CudaDesk:
    return CudaDesk(small_spec(layers=1), num_rows=num_rows)


def single(params: SamplingParams, num: int, stops: frozenset[int] = STOPS) -> tuple[list[int], list[TokenLogprob]]:
    """Alone, step by step: tokens, and what is told of each if that is asked."""
    mine = desk()
    results = [mine.prefill(mine.join(0, PROMPT, params, stop_ids=stops))]
    results += [mine.step([0]) for _ in range(num - 1)]
    return [token for result in results for token in result.tokens], [
        each for result in results for each in result.logprobs.get(0, ())
    ]


def verify(mine: CudaDesk, drafts: list[int], row: int = 0, decode: tuple[int, ...] = ()) -> StepResult:
    chunk = Chunk(row, NUM, 1 + len(drafts), Samples.VERIFY, drafts=tuple(drafts))
    return mine.step(decode, [chunk])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_tokens_up_to_the_first_wrong_guess_and_all_behind_them_are_those_of_single_steps(
    name: str, num_right: int
) -> None:
    params = CASES[name]
    answer, told = single(params, 7)
    mine, alone = desk(), desk()
    company = alone.prefill(alone.join(1, OTHER)).tokens + alone.decode(1, 1)
    chunks = [Chunk(0, 0, NUM, Samples.TOKEN), Chunk(1, 0, len(OTHER), Samples.TOKEN)]
    joins = [mine.join(0, PROMPT, params, stop_ids=STOPS), mine.join(1, OTHER)]
    assert mine.step(chunks=chunks, joins=joins).tokens == [answer[0], company[0]]
    drafts = answer[1:4]
    if num_right < 3:
        drafts[num_right] = (drafts[num_right] + 1) % mine.spec.vocab_size
    result = verify(mine, drafts, decode=(1,))
    assert result.counts == {0: num_right + 1}
    assert result.tokens == [company[1], *answer[1 : num_right + 2]]
    if params.logprobs is not None:
        found = list(result.logprobs[0])
        assert [[token for token, _ in entry.top] for entry in found] == [
            [t for t, _ in entry.top] for entry in told[1:]
        ][: len(found)]
        # The interpreter's products of several tokens have other bits than those of one.
        near = pytest.approx([entry.logprob for entry in told[1 : num_right + 2]], abs=0 if IS_CUDA else 1e-4, rel=0)
        assert [entry.logprob for entry in found] == near
        assert len(found) == num_right + 1
    rest = answer[num_right + 2 :]
    assert mine.decode(0, len(rest)) == rest


def test_a_row_goes_on_with_a_chunk_of_its_newest_token() -> None:
    answer, _ = single(GREEDY, 5)
    mine = desk()
    mine.prefill(mine.join(0, PROMPT))
    assert verify(mine, [answer[1], answer[2] + 1]).tokens == answer[1:3]
    again = mine.step(chunks=[Chunk(0, NUM + 2, 2, Samples.VERIFY, drafts=(answer[3],))])
    assert again.tokens == answer[3:5]


def test_a_row_that_decoded_goes_on_with_a_chunk_of_its_newest_token() -> None:
    answer, _ = single(GREEDY, 6)
    mine = desk()
    mine.prefill(mine.join(0, PROMPT))
    assert mine.decode(0, 2) == answer[1:3]
    result = mine.step(chunks=[Chunk(0, NUM + 2, 3, Samples.VERIFY, drafts=(answer[3], answer[4]))])
    assert result.tokens == answer[3:6]


def test_a_stop_token_ends_a_draft() -> None:
    answer, _ = single(GREEDY, 4, frozenset())
    mine = desk()
    mine.prefill(mine.join(0, PROMPT, stop_ids=frozenset({answer[2]})))
    result = verify(mine, answer[1:4])
    ends = answer.index(answer[2], 1)
    assert (result.tokens, result.counts, result.stopped) == (answer[1 : ends + 1], {0: ends}, [0])


def test_stop_tokens_are_out_of_reach_behind_drafts_too() -> None:
    stops = frozenset(range(120)) - {11, 12, 13}
    params = SamplingParams(temperature=0.0, min_tokens=3)
    answer, _ = single(params, 4, stops)
    assert not stops & set(answer[:3])
    mine = desk()
    mine.prefill(mine.join(0, PROMPT, params, stop_ids=stops))
    assert verify(mine, answer[1:3]).tokens == answer[1:]


def test_rows_whose_tokens_change_their_logits_take_one_at_a_time() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.6, frequency_penalty=0.3)
    answer, _ = single(params, 6)
    mine = desk()
    mine.prefill(mine.join(0, PROMPT, params, stop_ids=STOPS))
    result = verify(mine, answer[1:4])
    assert (result.tokens, result.counts) == (answer[1:2], {})
    assert mine.decode(0, 4) == answer[2:]


def test_drafts_that_no_line_of_logits_is_left_for_are_left_out() -> None:
    answer, _ = single(GREEDY, 5)
    mine = desk(num_rows=3)
    joins = [mine.join(0, PROMPT), mine.join(1, OTHER)]
    mine.step(chunks=[Chunk(0, 0, NUM, Samples.TOKEN), Chunk(1, 0, 3, Samples.TOKEN)], joins=joins)
    result = verify(mine, answer[1:4], decode=(1,))
    assert result.counts == {0: 2}
    assert result.tokens[1:] == answer[1:3]
    assert mine.decode(0, 2) == answer[3:]


def mask(mine: CudaDesk, *allowed: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(-(-mine.spec.vocab_size // 8), "little")


def test_each_draft_token_is_verified_under_its_own_mask() -> None:
    mine, lines = desk(), [range(at, 120, 5) for at in range(4)]
    answer = []
    mine.executor.supply(mine.next_plan, Late(masks=((0, mask(mine, *lines[0])),)))
    answer += mine.prefill(mine.join(0, PROMPT)).tokens
    for line in lines[1:]:
        mine.executor.supply(mine.next_plan, Late(masks=((0, mask(mine, *line)),)))
        answer += mine.step([0]).tokens
    mine = desk()
    mine.executor.supply(mine.next_plan, Late(masks=((0, mask(mine, *lines[0])),)))
    mine.prefill(mine.join(0, PROMPT))
    joined = b"".join(mask(mine, *line) for line in lines[1:])
    mine.executor.supply(mine.next_plan, Late(masks=((0, joined),)))
    assert verify(mine, answer[1:3]).tokens == answer[1:]


def test_a_draft_with_too_few_masks_fails_its_row_alone() -> None:
    answer, _ = single(GREEDY, 3)
    mine, alone = desk(), desk()
    company = alone.prefill(alone.join(1, OTHER)).tokens + alone.decode(1, 1)
    joins = [mine.join(0, PROMPT), mine.join(1, OTHER)]
    mine.step(chunks=[Chunk(0, 0, NUM, Samples.TOKEN), Chunk(1, 0, 3, Samples.TOKEN)], joins=joins)
    mine.executor.supply(mine.next_plan, Late(masks=((0, mask(mine, *range(120))),)))
    result = verify(mine, answer[1:3], decode=(1,))
    assert list(result.failed) == [0]
    assert result.tokens[0] == company[1]


def test_a_row_that_was_given_away_meanwhile_is_left_alone() -> None:
    mine, alone = desk(), desk()
    wanted = alone.prefill(alone.join(0, OTHER)).tokens + alone.decode(0, 2)
    answer, _ = single(GREEDY, 3)
    mine.prefill(mine.join(0, PROMPT))
    drafts = (answer[1] + 1, answer[2])
    mine.submit(chunks=[Chunk(0, NUM, 3, Samples.VERIFY, drafts=drafts)])
    mine.submit(chunks=[Chunk(0, 0, 3, Samples.TOKEN)], joins=[mine.join(0, OTHER)], leaves=[0])
    assert mine.executor.collect().tokens == answer[1:2]
    tokens = mine.executor.collect().tokens
    assert [*tokens, *mine.decode(0, 2)] == wanted


def test_an_empty_row_stays_empty_whatever_comes_of_its_drafts() -> None:
    mine = desk()
    mine.prefill(mine.join(0, PROMPT))
    mine.submit(chunks=[Chunk(0, NUM, 2, Samples.VERIFY, drafts=(5,))])
    mine.submit([], leaves=[0])
    mine.executor.collect()
    mine.executor.collect()
    assert "no request has joined" in mine.step([0]).failed[0]
    assert int(mine.executor._slots.known[0]) == 0  # type: ignore[attr-defined]


def test_what_is_sampled_behind_decode_rows_forks_and_drafts() -> None:
    chunks = [
        Chunk(3, 4, 5, Samples.VERIFY, drafts=(8, 9)),
        Chunk(5, 0, 2, Samples.NONE),
        Chunk(6, 9, 0, Samples.TOKEN, source=3),
        Chunk(7, 2, 0, Samples.TOKEN, source=4),
    ]
    failed: dict[int, str] = {}
    found = samples_of(np.array([1, 2]), chunks, failed)
    assert found == [SampledEntry(4, 3, 7), SampledEntry(5, 3, 8), SampledEntry(6, 3, 9), SampledEntry(6, 6, 9)]
    assert list(failed) == [7]
    short = shortened(chunks, 1, ())
    assert (short[0].count, short[0].drafts, short[0].samples) == (4, (8,), Samples.VERIFY)
    none = shortened(chunks, 5, {3})
    assert (none[0].count, none[0].drafts, none[0].samples) == (3, (), Samples.TOKEN)
    assert [count_right(words, (8, 9)) for words in ([7, 9, 1], [8, 7, 1], [8, 9, 1], [8 | 1 << 30, 9, 1])] == [
        1,
        2,
        3,
        1,
    ]
