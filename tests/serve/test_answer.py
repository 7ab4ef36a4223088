"""One answer: text, stop strings and counts do not depend on how the tokens were split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.client import Output
from headway.serve.answer import ServedAnswer
from headway.text.answer_parts import AnswerParts
from headway.text.call_format import TAGGED
from headway.text.thoughts import Thinking
from headway.text.tokenizer import Tokenizer
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob
from serve_harness import byte_tokenizer, byte_vocabulary

TOKENIZER = byte_tokenizer()


def tokens_of(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def pushed(params: SamplingParams, parts: list[list[int]], finish: str) -> tuple[ServedAnswer, str, list[str]]:
    answer = ServedAnswer(0, 1, params, TOKENIZER, (0,))
    deltas = [answer.push(Output(1, part)) for part in parts]
    deltas.append(answer.push(Output(1, finish=finish, cached_tokens=5)))
    finishes = [delta.finish for delta in deltas if delta.finish is not None]
    return answer, "".join(delta.text for delta in deltas), finishes


@settings(deadline=None)
@given(
    text=st.text(alphabet="abé\U0001f600", max_size=30),
    stops=st.lists(st.text(alphabet="abé\U0001f600", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 120), max_size=6),
)
def test_any_split_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    tokens = tokens_of(text)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    parts = [tokens[a:b] for a, b in itertools.pairwise(edges)]
    answer, shown, finishes = pushed(SamplingParams(stop=tuple(stops)), parts, "length")
    starts = [text.find(stop) for stop in stops if stop in text]
    assert shown == (text[: min(starts)] if starts else text)
    assert finishes == (["stop"] if starts else ["length"])
    assert answer.cached_tokens == 5
    if not starts:
        assert answer.num_tokens == len(tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_tokens_after_the_stop_string_are_not_counted(size: int) -> None:
    tokens = tokens_of("one two three")
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    answer, shown, finishes = pushed(SamplingParams(stop="two"), parts, "stop")
    assert (shown, finishes, answer.num_tokens) == ("one ", ["stop"], len("one two"))


@pytest.mark.parametrize("size", [1, 100])
def test_stop_token_is_counted_and_not_shown(size: int) -> None:
    tokens = [*tokens_of("abc"), 0]
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    answer, shown, finishes = pushed(SamplingParams(), parts, "stop")
    assert (shown, finishes, answer.num_tokens) == ("abc", ["stop"], 4)


def test_half_a_character_is_held_until_it_is_whole_or_the_end() -> None:
    answer = ServedAnswer(0, 1, SamplingParams(), TOKENIZER)
    first, second = tokens_of("é")
    assert answer.push(Output(1, [first])).text == ""
    assert answer.push(Output(1, [second, first])).text == "é"
    assert answer.push(Output(1, finish="length")).text == "�"


def test_logprobs_are_finite_and_one_per_counted_token() -> None:
    answer = ServedAnswer(0, 1, SamplingParams(logprobs=1, stop="b"), TOKENIZER)
    entry = TokenLogprob(float("-inf"), ((2, float("-inf")),))
    delta = answer.push(Output(1, tokens_of("abc"), [entry] * 3))
    assert [(e.token, e.logprob, e.top_logprobs[0].logprob) for e in delta.entries] == [
        ("a", -9999.0, -9999.0),
        ("b", -9999.0, -9999.0),
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_where_special_tokens_open_and_close_them(size: int) -> None:
    inner = byte_vocabulary()
    inner.add_special_tokens(list(TAGGED.marks))
    tokenizer = Tokenizer(inner)
    tokens = tokenizer.encode("So:\n" + TAGGED.written("f", '{"a": "<b>"}'))
    assert tokenizer.token_to_id("<tool_call>") in tokens
    parts = AnswerParts.of(TAGGED, Thinking.NEVER, tokenizer)
    answer = ServedAnswer(0, 1, SamplingParams(), tokenizer, (0,), parts, b"key")
    assert answer.texts is None
    deltas = [answer.push(Output(1, tokens[at : at + size])) for at in range(0, len(tokens), size)]
    deltas.append(answer.push(Output(1, finish="stop")))
    pieces = [piece for delta in deltas for piece in delta.calls]
    assert "".join(delta.text for delta in deltas) == "So:"
    assert (pieces[0].name, "".join(piece.arguments for piece in pieces)) == ("f", '{"a": "<b>"}')
    assert (deltas[-1].finish, answer.finish) == ("tool_calls", "stop")
