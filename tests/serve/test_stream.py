"""The parts of a stream: chunks written through frames, a client that stops reading, numbers counted per token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from headway.serve.answer import Delta
from headway.serve.body import ClientGone
from headway.serve.formats import ChatFormat, CompletionFormat
from headway.serve.metrics import Metrics, Tally
from headway.serve.openai import TokenEntry
from headway.serve.sse import Patience

TEXTS = ["a", "", '"quoted" \\ \n\t', "\u00e9\u65e5\U0001f600", "</script>\u2028", "0" * 40]


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_a_plain_chunk_is_the_one_that_a_whole_encoding_gives(text: str, has_usage: bool) -> None:
    completion = CompletionFormat("cmpl-1", 7, 'a "model"', "print", has_usage, None)
    chat = ChatFormat("chatcmpl-1", 7, 'a "model"', "print", has_usage, False)
    usage = {"usage": None} if has_usage else {}
    common = {"created": 7, "model": 'a "model"', "system_fingerprint": "print", **usage}
    for index in (0, 3, 0):
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        expected = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], **common}
        assert json.loads(completion.chunk(index, Delta(text, []))) == expected
        said = {"content": text} if text else {}
        choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": None}
        expected = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **common}
        assert json.loads(chat.chunk(index, Delta(text, []))) == expected


def test_a_plain_chunk_and_the_last_one_have_the_same_keys_in_the_same_order() -> None:
    for format in (CompletionFormat("i", 1, "m", "f", False, None), ChatFormat("i", 1, "m", "f", False, False)):
        plain, last = json.loads(format.chunk(0, Delta("x", []))), json.loads(format.chunk(0, Delta("x", [], "stop")))
        assert list(plain) == list(last)
        assert list(plain["choices"][0]) == list(last["choices"][0])
        assert last["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_are_never_left_out_of_a_chunk() -> None:
    entry = TokenEntry("x", -0.5, [120], [])
    for format in (CompletionFormat("i", 1, "m", "f", False, 1), ChatFormat("i", 1, "m", "f", False, True)):
        assert json.loads(format.chunk(0, Delta("x", [entry])))["choices"][0]["logprobs"] is not None


async def test_a_task_that_waits_too_long_for_one_thing_is_ended() -> None:
    async def work() -> None:
        with Patience(0.01) as patience:
            patience.begin()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(ClientGone):
        await task
    assert not task.cancelling()


class HandClock:
    """An event loop's clock that is moved by hand; it keeps the one timer that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> HandClock:
        self.due = (self.now + delay_s, callback)
        return self

    def cancel(self) -> None:
        self.due = None

    def move_to(self, now: float) -> None:
        while self.due is not None and self.due[0] <= now:
            (self.now, callback), self.due = self.due, None
            callback()
        self.now = now


async def test_many_short_waits_are_no_long_one_and_what_is_not_begun_is_not_timed() -> None:
    clock = HandClock()

    async def work() -> None:
        with Patience(30, clock) as patience:  # type: ignore[arg-type]
            for second in range(0, 100, 20):
                clock.move_to(second)
                patience.begin()
                clock.move_to(second + 19)
                patience.end()
            clock.move_to(1000)
            patience.begin()
            for now in (1029.9, 1030):
                clock.move_to(now)
                await asyncio.sleep(0)

    with pytest.raises(ClientGone):
        await asyncio.create_task(work())
    assert (clock.now, clock.due) == (1030, None)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def work() -> None:
        with Patience(60) as patience:
            patience.begin()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("is_one_by_one", [True, False])
def test_a_tally_counts_into_cumulated_buckets(is_one_by_one: bool) -> None:
    tally = Tally("t_seconds", "text", (0.1, 1.0))
    if is_one_by_one:
        for seconds in (0.05, 0.1, 0.5, 1.5, 7.0):
            tally.observe(seconds)
    else:
        tally.observe_all([0.05, 0.1, 0.5, 1.5])
        tally.observe_all([7.0])
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in tally.family().samples}
    assert samples == {
        ("t_seconds_bucket", "0.1"): 2,
        ("t_seconds_bucket", "1.0"): 3,
        ("t_seconds_bucket", "+Inf"): 5,
        ("t_seconds_count", None): 5,
        ("t_seconds_sum", None): pytest.approx(9.15),
    }


def test_the_page_shows_times() -> None:
    metrics = Metrics()
    metrics.itls.append(0.03)
    metrics.settle()
    metrics.first_token(0.2)
    metrics.ended("stop", 1.0)
    page = metrics.page().decode()
    assert 'headway_inter_token_seconds_bucket{le="0.05"} 1.0' in page
    assert "# TYPE headway_inter_token_seconds histogram" in page
    assert "headway_time_to_first_token_seconds_count 1.0" in page
    assert 'headway_requests_total{finish="stop"} 1.0' in page
