"""Every rule of the sampler against a naive reference, and its independence of other rows."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import RowFailed
from headway.runner.dry import breaker_mask, repeats
from headway.runner.rng import uniform
from headway.runner.sampler import adjust, choose, draw, filtered, largest, logprob, sample
from headway.runner.slots import RowRequest, Slots
from headway.values.params import SamplingParams
from headway.values.plan import Join
from runner_kit import naive_choose, naive_probs, naive_repeats, naive_scores

VOCAB = 101
PROMPT = (5, 9, 9, 40)
STOPS = frozenset({3, 77})

# Each with what it needs beside the defaults; together they touch every rule alone and combined.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.05},
    "icy": {"temperature": 1e-30},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-9},
    "top_p near 1": {"top_p": 0.9999999},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "all filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {8: 4.0, 9: -100.0}, "temperature": 0.0},
    "dry": {"dry_multiplier": 0.8, "temperature": 0.0, "dry_allowed_length": 1},
    "dry with breakers": {"dry_multiplier": 2.0, "dry_base": 1.1, "dry_breakers": (9, 60), "dry_allowed_length": 1},
    "dry of the last ones": {"dry_multiplier": 5.0, "dry_range": 5, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.5},
    "xtc always": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 1.6, "top_k": 30},
    "min_tokens": {"min_tokens": 6, "temperature": 0.0},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.5, 77: 30.0},
        "min_tokens": 5,
        "logprobs": 3,
    },
}


def _seat(params: SamplingParams, seed: int = 11, stop_ids: frozenset[int] = STOPS) -> RowRequest:
    return RowRequest(1, len(PROMPT), params, seed, stop_ids, breaker_mask(params.dry_breakers, VOCAB))


def _tokens(output: tuple[int, ...]) -> np.ndarray:
    return np.array((*PROMPT, *output), np.int32)


def _random_logits(seed: int, vocab: int = VOCAB, num: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num, vocab)).astype(np.float32)


@pytest.mark.parametrize("name", PARAMS)
def test_choices_equal_the_naive_reference(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    for case in range(60):
        output = tuple(np.random.default_rng(case).integers(0, VOCAB, case % 9).tolist())
        logits = _random_logits(case)[0]
        expected = naive_choose(logits, params, 11, PROMPT, output, STOPS)
        assert choose(logits, _seat(params), _tokens(output)) == expected


@pytest.mark.parametrize("name", PARAMS)
def test_adjusted_logits_equal_the_naive_reference_and_leave_the_input_alone(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    for output in ((), (3, 3, 9, 60), (3, 3, 9, 60, 61, 62, 3)):
        logits = _random_logits(5)[0]
        before = logits.copy()
        scores = adjust(logits, _seat(params), _tokens(output))
        np.testing.assert_allclose(scores, naive_scores(logits, params, PROMPT, output, STOPS), rtol=1e-5, atol=1e-5)
        assert (logits == before).all()


@pytest.mark.parametrize(
    "name", [name for name, given in PARAMS.items() if given.get("temperature") not in (0.0, 1e-30)]
)
def test_filters_keep_the_tokens_and_odds_of_the_naive_reference(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    for case in range(20):
        logits = _random_logits(case, vocab=3000)[0]
        ids, weights = filtered(logits, params)
        expected = naive_probs(logits.tolist(), params)
        kept = [*range(len(logits))] if ids is None else ids.tolist()
        assert kept == [*expected]
        np.testing.assert_allclose(weights / weights.sum(dtype=np.float64), [*expected.values()], rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("case", range(200))
def test_repeats_are_those_of_the_naive_reference(case: int) -> None:
    rng = np.random.default_rng(case)
    tokens = rng.integers(0, 1 + case % 4, int(rng.integers(0, 150))).astype(np.int32)  # few kinds: many repeats
    params = SamplingParams(
        dry_multiplier=1.5,
        dry_base=1.25,
        dry_allowed_length=1 + case % 3,
        dry_range=int(rng.integers(0, 60)),
        dry_breakers=(2,) if case % 2 else (),
    )
    found = repeats(tokens, params, breaker_mask(params.dry_breakers, VOCAB))
    lengths = naive_repeats(tokens.tolist(), params)
    assert found.ids.tolist() == sorted(lengths)
    wanted = [1.5 * 1.25 ** (lengths[token] - params.dry_allowed_length) for token in sorted(lengths)]
    np.testing.assert_allclose(found.amounts, wanted, rtol=1e-5)


def test_dry_takes_a_greedy_answer_out_of_its_loop() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[:4] = 4, 3, 2, 1

    def answer(**params: float) -> list[int]:
        request, output = _seat(SamplingParams(temperature=0.0, **params)), list[int]()  # type: ignore[arg-type]
        for _ in range(30):
            output.append(choose(logits, request, _tokens(tuple(output))))
        return output

    assert set(answer()) == {0}
    assert len(set(answer(dry_multiplier=2.0))) > 2


def test_xtc_leaves_out_the_likeliest_as_often_as_it_is_told_to() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    params = SamplingParams(xtc_probability=0.25, xtc_threshold=0.2)
    num = 4000
    drawn = Counter(
        choose(logits, RowRequest(1, 0, params, seed, frozenset()), np.empty(0, np.int32)) for seed in range(num)
    )
    # Three times in four as it is; else without the first: 0.6, 0.3 and 0.1 of the others.
    for token, share in enumerate((0.375, 0.75 * 0.3 + 0.25 * 0.6, 0.75 * 0.15 + 0.25 * 0.3, 0.75 * 0.05 + 0.25 * 0.1)):
        assert abs(drawn[token] / num - share) < 0.03


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=1.3, top_k=12)
    logits = _random_logits(2)[0]
    expected = naive_probs(logits.tolist(), params)
    num = 6000
    seen = Counter(choose(logits, _seat(params, seed), _tokens(())) for seed in range(num))
    assert seen.keys() <= expected.keys()
    chi_square = sum((seen[token] - num * p) ** 2 / (num * p) for token, p in expected.items())
    assert chi_square < 45  # 11 degrees of freedom


def test_a_draw_from_a_large_vocabulary_inverts_the_whole_running_sum() -> None:
    logits = _random_logits(4, vocab=49_152)[0]
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    for seed in range(100):
        expected = int(np.searchsorted(np.cumsum(weights), uniform(seed, len(PROMPT)) * weights.sum(), side="right"))
        assert choose(logits, _seat(SamplingParams(), seed), _tokens(())) == expected


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = np.full(2000, -np.inf, np.float32)
    logits[[600, 1300]] = 0.0
    drawn = {choose(logits, _seat(SamplingParams(), seed), _tokens(())) for seed in range(200)}
    assert drawn == {600, 1300}


@pytest.mark.parametrize("num", [1, 2, 255, 256, 257, 700])
def test_the_ends_of_the_unit_interval_draw_real_weights(num: int) -> None:
    # The sum over a span and the running sum inside it round differently; neither may lead outside.
    for seed in range(50):
        spread = np.random.default_rng(seed).random(num)
        weights = np.zeros(num + 600, np.float32)
        weights[300 : 300 + num] = 0.5 + spread
        assert draw(weights, 0.0) == 300
        assert draw(weights, 1 - 2.0**-53) == 299 + num
        weights[300 : 300 + num] = 10.0 ** (-14 * spread)
        assert weights[draw(weights, 1 - 2.0**-53)] > 0


def test_the_nucleus_is_cut_among_equals_by_id() -> None:
    ids, weights = filtered(np.array([0, 2, 0, 2, 2, 0], np.float32), SamplingParams(top_p=0.5))
    assert ids is not None
    assert (ids.tolist(), weights.tolist()) == ([1, 3], [1.0, 1.0])


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[60, 20, 90]] = 2.0
    assert choose(logits, _seat(SamplingParams(temperature=0.0)), _tokens(())) == 20
    ids, _ = filtered(logits, SamplingParams(top_k=2))
    assert ids is not None
    assert ids.tolist() == [20, 60]
    assert [token for token, _ in logprob(logits, 0, 4).top] == [20, 60, 90, 0]


def test_logit_bias_can_force_and_forbid() -> None:
    logits = _random_logits(1)[0]
    forced = SamplingParams(logit_bias={42: 100.0})
    assert {choose(logits, _seat(forced, seed), _tokens(())) for seed in range(50)} == {42}
    best = int(logits.argmax())
    forbidden = SamplingParams(temperature=0.0, logit_bias={best: -100.0})
    assert choose(logits, _seat(forbidden), _tokens(())) == int(np.argsort(-logits)[1])


def test_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = _random_logits(1)[0]
    logits[77] = 50.0
    request = _seat(SamplingParams(temperature=0.0, min_tokens=2))
    assert choose(logits, request, _tokens((1,))) != 77
    assert choose(logits, request, _tokens((1, 1))) == 77


def test_a_stop_token_outside_the_vocabulary_is_no_trouble() -> None:
    request = _seat(SamplingParams(temperature=0.0, min_tokens=2), stop_ids=frozenset({5, 10**6}))
    logits = _random_logits(1)[0]
    logits[5] = 50.0
    assert choose(logits, request, _tokens(())) != 5


def test_a_row_with_every_token_masked_fails_with_a_reason() -> None:
    request = _seat(SamplingParams(min_tokens=2), stop_ids=frozenset(range(VOCAB)))
    with pytest.raises(RowFailed, match="every one is masked"):
        choose(_random_logits(1)[0], request, _tokens(()))


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    for case in range(20):
        logits = _random_logits(case, vocab=5000)[0]
        expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
        top, top_ids = expected.topk(20)
        entry = logprob(logits, 123, 20)
        assert entry.logprob == pytest.approx(float(expected[123]), abs=1e-5)
        assert [token for token, _ in entry.top] == top_ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.tolist(), abs=1e-5)
    assert logprob(logits, 123, 0).top == ()
    assert len(logprob(logits[:7], 3, 20).top) == 7


def test_extreme_logits_stay_quiet_and_right() -> None:
    logits = np.array([3e38, -3e38, 0.0, -np.inf], np.float32)
    request = _seat(SamplingParams(temperature=1e-20, logprobs=2))
    assert choose(logits, request, _tokens(())[:0]) == 0
    assert logprob(logits, 0, 2).logprob == 0.0
    assert logprob(logits, 3, 0).logprob == -math.inf


# ---- batches ---------------------------------------------------------------------------------------------------


def _slots(all_params: list[SamplingParams]) -> Slots:
    slots = Slots(num_rows=len(all_params), num_blocks=64, block_size=4, max_len=64, vocab_size=VOCAB)
    for row, params in enumerate(all_params):
        tokens = (*PROMPT, *range(row % 4))
        slots.join(Join(row, row, 0, tokens, len(PROMPT), (row,), 0, params, row * 17, STOPS))
    return slots


def _sample(slots: Slots, logits: np.ndarray, rows: list[int]) -> dict[int, object]:
    at = np.array(rows)
    out = sample(logits, np.arange(len(rows)), at, slots.known[at], slots)
    return {row: (token, out.logprobs.get(row)) for row, token in zip(rows, out.tokens.tolist(), strict=True)}


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    all_params = [SamplingParams(**given) for given in PARAMS.values()]
    all_params += [SamplingParams(temperature=t / 10, logprobs=5) for t in range(1, 15)]
    slots = _slots(all_params)
    logits = _random_logits(8, num=len(all_params))
    rows = [*range(len(all_params))]
    together = _sample(slots, logits, rows)
    alone = {row: _sample(slots, logits[[row]], [row])[row] for row in rows}
    order = np.random.default_rng(0).permutation(rows).tolist()
    shuffled = _sample(slots, logits[order], order)
    assert together == alone == shuffled


def test_rows_may_share_one_line_of_logits() -> None:
    slots = _slots([SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5)])
    line = _random_logits(3)
    rows = np.array([2, 0, 1])
    out = sample(line, np.array([0, 0, 0]), rows, slots.known[rows], slots)
    for row, token in zip(rows.tolist(), out.tokens.tolist(), strict=True):
        request = slots.request(row)
        assert token == choose(line[0], request, slots.tokens[row, : slots.known[row]])


@pytest.mark.parametrize("sick", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_a_row_without_finite_logits_fails_and_its_neighbours_do_not(sick: float, name: str) -> None:
    slots = _slots([SamplingParams(**PARAMS[name])] * 3)
    logits = _random_logits(6, num=3)
    healthy = _sample(slots, logits, [0, 1, 2])
    logits[1, 50] = sick
    out = sample(logits, np.arange(3), np.arange(3), slots.known[:3], slots)
    assert out.failed == {1: "logits are not finite"}
    assert [out.tokens[0], out.tokens[2]] == [healthy[0][0], healthy[2][0]]  # type: ignore[index]


def test_trouble_in_one_row_is_reported_for_that_row_alone() -> None:
    slots = _slots([SamplingParams(), SamplingParams(min_tokens=9), SamplingParams()])
    object.__setattr__(slots.request(1), "stop_ids", frozenset(range(VOCAB)))
    object.__setattr__(slots.request(2), "seed", "not a number")
    out = sample(_random_logits(6, num=3), np.arange(3), np.arange(3), slots.known[:3], slots)
    assert out.failed.keys() == {1, 2}
    assert "every one is masked" in out.failed[1]
    assert out.failed[2].startswith("sampling failed: TypeError")


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_are_those_of_a_stable_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for size in (1, 31, 64, 1000, 4099):
        for spread in (3, 10_000):  # of few values many are equal
            values = rng.integers(-spread, spread, size).astype(np.float32)
            values[rng.random(size) < 0.05] = -np.inf
            ranked = np.argsort(-values, kind="stable").tolist()
            for count in {1, 2, size // 100 + 1, size // 33 + 1, size // 32 + 1, size - 1, size, size + 7} - {0}:
                assert largest(values, count).tolist() == ranked[:count]


@pytest.mark.parametrize("name", PARAMS)
def test_a_scratch_that_others_left_full_changes_nothing(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    scratch = np.full(VOCAB, np.nan, np.float32)
    for case in range(20):
        logits = _random_logits(case)[0]
        before = logits.copy()
        expected = choose(logits, _seat(params), _tokens((3, 9, 3)))
        assert choose(logits, _seat(params), _tokens((3, 9, 3)), scratch) == expected
        assert (logits == before).all()
