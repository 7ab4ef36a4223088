"""Sampling on the device against the CPU's sampler, which is the oracle, and the numbers it draws with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cuda_kit import DEVICE, IS_CUDA, LAUNCH
from headway.kernels.cuda import special
from headway.kernels.cuda.layout import HEADER_WORDS, TOKEN_BITS, Header, Status
from headway.runner.cuda.sampler import DeviceSampler
from headway.runner.cuda.state import DeviceState, Pokes
from headway.runner.cuda.wire import Wire
from headway.runner.sampler import choose, logprob
from headway.runner.slots import RowRequest
from headway.values.params import SamplingParams
from headway.values.plan import Join

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PROMPT = (5, 9, 9, 40)
OUTPUT = (8, 9, 8)
STOPS = frozenset({3, 77})
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 500_000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-9},
    "top_p below float32": {"top_p": 1e-60},
    "top_p near 1": {"top_p": 0.9999},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {8: 4.0, 9: -100.0}, "temperature": 0.0},
    "min_tokens": {"min_tokens": 6, "temperature": 0.0},
    "logprobs": {"logprobs": 5},
    "everything": {
        **{"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
        **{"presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {1: 2.5, 77: 30.0}},
        **{"min_tokens": 5, "logprobs": 3},
    },
}


class Sampling:
    """Rows that were joined with their tokens, and one line of logits for each."""

    def __init__(self, rows: list[SamplingParams], vocab: int, output: tuple[int, ...] = OUTPUT) -> None:
        self.tokens = (*PROMPT, *output)
        self.state = DeviceState(num_rows=len(rows), max_blocks=1, vocab_size=vocab, device=DEVICE)
        lines = max(4, 1 << (len(rows) - 1).bit_length())
        self.sampler = DeviceSampler(self.state, LAUNCH, lines=lines, vocab_size=vocab)
        self.wire = Wire(slots=4, words=64, lines=lines, device=DEVICE)
        self.joins = [
            Join(i, i, 0, self.tokens, len(PROMPT), (0,), len(self.tokens), params, 1000 + 7 * i, STOPS)
            for i, params in enumerate(rows)
        ]
        self.rows = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
        self.places = torch.full_like(self.rows, len(self.tokens))
        for join in self.joins:
            pokes = Pokes()
            if self.state.join(join, pokes):
                ids = torch.tensor(self.tokens, dtype=torch.int32, device=DEVICE)
                numbers = (join.row, join.num_prompt, len(self.tokens), vocab)
                special.count_tokens[(1,)](ids, self.state.counts, *numbers, BLOCK=2048, num_warps=8)
            places = torch.tensor(list(pokes), device=DEVICE)
            self.state.words[places] = torch.tensor(list(pokes.values()), dtype=torch.int32, device=DEVICE)

    def draw(self, logits: torch.Tensor, masks: dict[int, np.ndarray] | None = None) -> list[int]:
        """The words that the device reports; masks [vocab] are by row."""
        packet = packed(masks or {}, len(self.rows)).to(DEVICE)
        self.sampler.launch(logits.to(DEVICE), self.rows, self.places, packet, self.wire, is_special=True)
        if IS_CUDA:
            torch.cuda.synchronize()
        assert int(self.wire.flags.max()) > 0
        return self.wire.tokens[int(self.wire.counter - 1) % 4, : len(self.rows)].tolist()

    def expected(self, logits: np.ndarray, row: int) -> int:
        join = self.joins[row]
        request = RowRequest(join.id, join.num_prompt, join.params, join.seed, join.stop_ids)
        return choose(logits, request, np.array(self.tokens, np.int32))


def packed(masks: dict[int, np.ndarray], num: int) -> torch.Tensor:
    """As `packet` lays masks out."""
    words = np.zeros(HEADER_WORDS + num, np.int32)
    words[Header.NUM_MASKED], words[Header.MASKS] = num if masks else 0, HEADER_WORDS
    for row, mask in masks.items():
        bits = np.packbits(mask, bitorder="little").tobytes()
        words[HEADER_WORDS + row] = len(words)
        words = np.concatenate([words, np.frombuffer(bits.ljust(-(-len(mask) // 32) * 4, b"\0"), np.int32)])
    return torch.from_numpy(words)


@pytest.mark.parametrize("vocab", [101, 128_256] if IS_CUDA else [101])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_those_of_the_cpus_sampler(name: str, vocab: int) -> None:
    num = 24 if IS_CUDA else 3
    logits = np.random.default_rng(len(name)).standard_normal((num, vocab)).astype(np.float32) * 3
    logits[0] = np.round(logits[0])  # ties
    sampling = Sampling([SamplingParams(**PARAMS[name], max_tokens=50)] * num, vocab)
    words = sampling.draw(torch.from_numpy(logits))
    expected = [sampling.expected(logits[row], row) for row in range(num)]
    assert [word & TOKEN_BITS for word in words] == expected
    assert [bool(word & Status.STOPPED) for word in words] == [token in STOPS for token in expected]


@pytest.mark.parametrize("vocab", [101, 128_256] if IS_CUDA else [101])
@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p", "bias", "min_tokens", "everything"])
def test_a_mask_leaves_the_cpus_choice_among_what_it_allows(name: str, vocab: int) -> None:
    rng = np.random.default_rng(len(name))
    logits = rng.standard_normal((4, vocab)).astype(np.float32) * 3
    masks = {row: rng.random(vocab) < share for row, share in ((0, 0.5), (2, 0.04), (3, 0.0))}
    masks[3][vocab - 1] = True
    sampling = Sampling([SamplingParams(**PARAMS[name], max_tokens=50)] * 4, vocab)
    tokens = [word & TOKEN_BITS for word in sampling.draw(torch.from_numpy(logits), masks)]
    allowed = [np.where(masks[row], logits[row], -np.inf) if row in masks else logits[row] for row in range(4)]
    assert tokens == [sampling.expected(allowed[row], row) for row in range(4)]
    assert tokens[3] == vocab - 1
    assert tokens != [sampling.expected(logits[row], row) for row in range(4)]


def test_log_probabilities_are_those_of_the_cpus_sampler() -> None:
    logits = np.random.default_rng(3).standard_normal((2, 101)).astype(np.float32) * 3
    logits[1, 40:50] = 6.0
    sampling = Sampling([SamplingParams(logprobs=5), SamplingParams(temperature=0.0, logprobs=0)], 101)
    words = sampling.draw(torch.from_numpy(logits))
    for row, num in enumerate((5, 0)):
        wanted = logprob(logits[row], words[row] & TOKEN_BITS, num)
        values = sampling.wire.logprobs[0, row].tolist()
        ids = sampling.wire.logprob_ids[0, row].tolist()
        assert values[0] == pytest.approx(wanted.logprob, abs=1e-5)
        assert ids[1 : num + 1] == [token for token, _ in wanted.top]
        assert values[1 : num + 1] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


@pytest.mark.parametrize("vocab", [101, 4097])
def test_alternatives_that_are_impossible_are_real_tokens_too(vocab: int) -> None:
    logits = np.full((2, vocab), -np.inf, np.float32)
    logits[0, [vocab - 1, 7]] = 1.0
    logits[1, 50] = -2.0
    sampling = Sampling([SamplingParams(temperature=0.0, logprobs=5)] * 2, vocab)
    assert sampling.draw(torch.from_numpy(logits)) == [7, 50]
    for row, wanted in enumerate(([7, vocab - 1, 0, 1, 2], [50, 0, 1, 2, 3])):
        assert sampling.wire.logprob_ids[0, row].tolist()[1:6] == wanted
        assert [token for token, _ in logprob(logits[row], wanted[0], 5).top] == wanted


def test_what_is_not_finite_is_reported_with_a_legal_token() -> None:
    plain, odd = SamplingParams(), SamplingParams(top_k=3)
    sampling = Sampling([plain, odd, plain, odd, plain], 101)
    logits = torch.randn(5, 101)
    logits[0, 50] = float("nan")
    logits[1, 7] = float("nan")
    logits[2, 9] = float("inf")
    logits[3] = -float("inf")
    words = sampling.draw(logits)
    assert words[:4] == [Status.NOT_FINITE] * 4
    assert words[4] & TOKEN_BITS == sampling.expected(logits[4].numpy(), 4)
    masked = SamplingParams(temperature=0.0, logit_bias={i: -100.0 for i in range(4)}, min_tokens=5)
    sampling = Sampling([masked], 101)
    logits = torch.full((1, 101), -float("inf"))
    logits[0, 3] = 1.0  # the only token is a stop, and it is too early for one
    assert sampling.draw(logits) == [Status.MASKED]


def test_zeros_of_both_signs_are_ties() -> None:
    logits = np.full((2, 101), -5.0, np.float32)
    logits[:, 30:60] = np.where(np.arange(30) % 2, 0.0, -0.0)
    sampling = Sampling([SamplingParams(top_k=1), SamplingParams(top_k=1, temperature=2.0)], 101)
    words = sampling.draw(torch.from_numpy(logits))
    assert [word & TOKEN_BITS for word in words] == [sampling.expected(logits[row], row) for row in range(2)]


def test_stop_tokens_beyond_the_vocabulary_are_left_out() -> None:
    state = DeviceState(num_rows=1, max_blocks=1, vocab_size=101, device=DEVICE)
    params = SamplingParams(min_tokens=5)
    pokes, inside = Pokes(), Pokes()
    state.join(Join(0, 0, 0, PROMPT, len(PROMPT), (0,), 9, params, 1, frozenset({3, 77, 101, 128_009})), pokes)
    state.join(Join(0, 0, 0, PROMPT, len(PROMPT), (0,), 9, params, 1, STOPS), inside)
    assert pokes == inside


def test_a_sampled_token_is_counted() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampling = Sampling([params], 101, output=())
    logits = torch.zeros(1, 101)
    logits[0, 60], logits[0, 61] = 3.0, 2.0
    tokens = [sampling.draw(logits)[0] & TOKEN_BITS for _ in range(3)]
    assert tokens == [60, 61, 60]
