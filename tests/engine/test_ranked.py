"""A client with a ranker in front: lengths go in with requests, and come back from every way an answer can end."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path

import pytest

from echo_engine import EchoEngine
from headway.config import SchedulerConfig
from headway.control.lengths import Expected
from headway.engine.client import Submit
from headway.engine.local import LocalClient
from headway.engine.ranked import Forecast, RankedClient, open_forecast
from headway.errors import ConfigError, EngineDead
from headway.rank.features import Features
from headway.rank.learner import Learner
from headway.rank.log import Entry, Recorder, read_log
from headway.rank.model import RankModel
from headway.rank.offline import fit
from headway.rank.online import Ranker
from headway.values.params import SamplingParams
from planted import planted


class Noting(Ranker):
    """Keeps the completions it gets."""

    def __init__(self, learner: Learner | None = None) -> None:
        super().__init__(learner)
        self.learned: list[tuple[int, bool]] = []

    def learn(self, features: Features, num_output: int, is_cut: bool) -> None:
        self.learned.append((num_output, is_cut))


def knowing() -> Learner:
    learner = Learner()
    learner.resume(fit(planted(random.Random(1), 400)), tau=0.5)
    return learner


async def test_requests_carry_what_the_ranker_says_and_nothing_if_it_says_nothing() -> None:
    engine, params = EchoEngine(), SamplingParams(max_tokens=6, temperature=0.0)
    for learner in (None, knowing()):
        client = RankedClient(await LocalClient.start(lambda: engine), Forecast(Noting(learner)))
        async for _ in client.submit(Submit(1, [7, 8, 9], params)):
            pass
        async for _ in client.submit(Submit(2, [7, 8, 9], params, expected=3.0, ceiling=5.0)):
            pass
        await client.close()
    silent, given, predicted, kept = engine.submits
    assert (silent.expected, silent.ceiling) == (0.0, 0.0)
    assert 1.0 <= predicted.expected <= predicted.ceiling <= 6.0
    assert (given.expected, kept.expected, kept.ceiling) == (3.0, 3.0, 5.0)


async def test_every_end_is_learned_from() -> None:
    ranker = Noting()
    engine = EchoEngine(eos_after=4, max_model_len=10**6, num_blocks=10**5)
    client = RankedClient(await LocalClient.start(lambda: engine), Forecast(ranker))

    async def read(id: int, max_tokens: int) -> None:
        async for _ in client.submit(Submit(id, [5, 6], SamplingParams(max_tokens=max_tokens, temperature=0.0))):
            pass

    await read(1, 100)
    num_stop = ranker.learned[-1][0]
    assert ranker.learned == [(num_stop, False)]
    assert num_stop in (4, 5)
    await read(2, 3)
    assert ranker.learned[1:] == [(3, True)]
    await client.close()


async def test_an_abandoned_answer_was_cut_and_one_with_a_stop_string_was_not() -> None:
    ranker = Noting()
    engine = EchoEngine(hold_after=5, max_model_len=10**6, num_blocks=10**5)
    client = RankedClient(await LocalClient.start(lambda: engine), Forecast(ranker))
    params = SamplingParams(max_tokens=1000, temperature=0.0)

    async def five(id: int) -> object:
        stream = client.submit(Submit(id, [5, 6], params))
        while stream.num_tokens < 5:
            await anext(stream)
        return stream

    stream = await five(1)
    await stream.aclose()  # type: ignore[attr-defined]
    assert ranker.learned == [(5, True)]
    await five(2)
    client.abort(2)  # the reader stops
    assert ranker.learned[1:] == [(5, True)]
    stopped = await five(3)
    client.abort(3, "stop")
    assert ranker.learned[2:] == [], "the terminal output has not come yet"
    async for _ in stopped:  # type: ignore[attr-defined]
        pass
    assert ranker.learned[2:] == [(5, False)]
    client.abort(3)
    client.abort(99)
    assert len(ranker.learned) == 3
    assert not client._open
    assert not client._forecast._open
    await client.close()


async def test_a_refused_request_teaches_nothing_and_the_engine_is_that_of_the_other_client() -> None:
    ranker = Noting()
    inner = await LocalClient.start(lambda: EchoEngine(max_waiting=0))
    client = RankedClient(inner, Forecast(ranker))
    assert client.info is inner.info
    assert (await client.stats()).running == 0
    output = await anext(client.submit(Submit(1, [1], SamplingParams())))
    assert output.finish == "error"
    assert not ranker.learned
    assert client.dead is None
    await client.close()
    assert client.dead == inner.dead is not None


async def test_every_answer_is_written_down_with_or_without_a_ranker(tmp_path: Path) -> None:
    for ranker in (None, Noting()):
        path = tmp_path / f"{ranker is None}.jsonl"
        engine = EchoEngine(eos_after=4)
        clock = partial(next, iter([100.0, 101.0, 102.0]))
        client = RankedClient(
            await LocalClient.start(lambda engine=engine: engine),  # type: ignore[misc]
            Forecast(ranker, Recorder(path), clock),
        )
        for id, params in enumerate(
            [SamplingParams(max_tokens=100, temperature=0.0, stop="x"), SamplingParams(max_tokens=3, ignore_eos=True)]
        ):
            async for _ in client.submit(Submit(id, (5, 6), params, tenant="ann", route="chat")):
                pass
        async for output in client.submit(Submit(3, [1], SamplingParams(max_tokens=10**6))):
            assert output.finish == "error"
        await client.close()
        first, second = read_log(path)
        assert first.num_output in (4, 5)
        assert first == Entry([5, 6], 100, first.num_output, "stop", 100.0, "ann", "chat", 0.0, True, False)
        assert second == Entry([5, 6], 3, 3, "length", 101.0, "ann", "chat", 1.0, False, True)


async def test_a_request_that_never_reached_the_engine_is_forgotten() -> None:
    client = RankedClient(await LocalClient.start(EchoEngine), Forecast(Noting()))
    await client.close()
    with pytest.raises(EngineDead):
        client.submit(Submit(1, [1], SamplingParams()))
    assert not client._forecast._open


def test_a_forecast_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    assert open_forecast(SchedulerConfig()) is None
    bad = tmp_path / "bad.npz"
    bad.write_text("no")
    with pytest.raises(ConfigError, match="is not a ranker's state"):
        open_forecast(SchedulerConfig(policy="ltr", rank_state=str(bad), rank_log=str(tmp_path / "log.jsonl")))
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-rank-log"]


def test_expected_of_an_empty_model_is_one_token() -> None:
    assert RankModel.empty().expect(planted(random.Random(0), 1)[0].features) == Expected(1.0, 1.0)
