"""What the engine publishes: predicted waits that come true, by lane, without answers that others go before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from headway.bench.virtual import EngineSetup, Job, World, drive
from headway.build import build_scheduler
from headway.config import EngineConfig
from headway.core.policy import Policy
from headway.core.request import Request
from headway.engine.child import run
from headway.engine.client import Submit
from headway.engine.clock import VirtualClock
from headway.engine.messages import Abort, Command, Message, Shutdown
from headway.engine.metrics import EngineMetrics
from headway.engine.published import LaneBacklog, Published, Publisher
from headway.engine.tuning import Tuning
from headway.engine.wire import FrameReader, encode
from headway.errors import Overloaded
from headway.policies._caps import Capped
from headway.values.limits import Limits
from headway.values.params import SamplingParams


class Watched(World):
    """Notes what is published when a job comes."""

    def __init__(self, backlog: LaneBacklog, slots: int = 8, num_blocks: int = 4096) -> None:
        super().__init__(EngineSetup(Policy, Limits(slots, 512), num_blocks=num_blocks))
        self.scheduler.state.waiting.observer = backlog
        self.publisher = Publisher(self.scheduler)
        self.waits: list[float] = []

    def submit(self, id: int, job: Job) -> float | None:
        news = self.publisher.news(float(id), id, 1024) or self.publisher._last
        self.waits.append(news.waits.get(job.lane, 0.0))
        return super().submit(id, job)


@pytest.mark.parametrize("num_prompt", [16, 400])
@pytest.mark.parametrize("num_output", [20, 300])
def test_predicted_waits_come_true(num_prompt: int, num_output: int) -> None:
    rng = random.Random(num_prompt + num_output)
    each = 0.022 * num_output / 8 + 0.00014 * num_prompt  # the engine's seconds of one job, in full slots
    jobs = [
        Job(each / 2.5 * i, num_prompt, max(1, round(num_output * rng.uniform(0.5, 1.5))), max_tokens=2 * num_output)
        for i in range(240)
    ]
    world = Watched(LaneBacklog())
    run = drive(world, jobs)
    pairs = [(wait, record.ttft) for wait, record in zip(world.waits, run.records, strict=True)][80:]
    near = [0.5 <= wait / real <= 2.0 for wait, real in pairs if real > 1.0]
    assert len(near) > 100
    assert sum(near) / len(near) > 0.9


@pytest.mark.parametrize("slots", [64, 16])
def test_requests_that_find_a_slot_wait_for_prompts_alone(slots: int) -> None:
    """One row alone for a long time, then a burst: no answer has to end for those for which a slot is free."""
    lone = [Job(10.0 * i, 16, 200) for i in range(8)]
    burst = [Job(100.0, 64, 200) for _ in range(64)]
    world = Watched(LaneBacklog(), slots=slots)
    run = drive(world, [*lone, *burst])
    assert all(record.total < 10.0 for record in run.records[:8]), "one after the other"
    waits, real = world.waits[8:], [record.ttft for record in run.records[8:]]
    assert max(waits[:slots]) <= 2 * real[slots - 1], "the last that finds a slot"
    if slots < len(burst):
        assert 0.3 <= waits[-1] / real[-1] <= 3.0, "a batch of full slots, not of the one row that was usual before"


def test_every_answer_of_a_request_counts_while_it_waits() -> None:
    backlog = LaneBacklog()
    engine = Watched(backlog, slots=1).engine
    params = SamplingParams(max_tokens=8)
    engine.add(Submit(1, [7] * 4, params))
    engine.step()
    for id in range(2, 6):  # answers of one prompt
        engine.add(Submit(id, [9] * 4, params, parent=None if id == 2 else 2))
    assert backlog._lanes[""].count == 4
    assert backlog._lanes[""].num_prompt == 4
    assert engine.abort(4) is not None
    assert backlog._lanes[""].count == 3
    while engine.has_work:
        engine.step()
    assert not backlog._places
    assert (backlog._lanes[""].count, backlog._lanes[""].num_prompt, backlog._lanes[""].num_output) == (0, 0, 0.0)


def test_short_memory_does_not_make_a_batch_of_one() -> None:
    """One large request leaves no memory for the next: the many behind that run in batches as before."""
    warm = [Job(0.1 * i, 64, 100) for i in range(40)]
    large = [Job(40.0, 3600, 100), Job(41.5, 2000, 100)]
    small = [Job(41.6 + 0.02 * i, 16, 100) for i in range(15)]
    world = Watched(LaneBacklog(), slots=64, num_blocks=300)
    run = drive(world, [*warm, *large, *small])
    pairs = list(zip(world.waits, [record.ttft for record in run.records], strict=True))[42:]
    assert min(real for _, real in pairs) > 1.0
    assert all(wait < 2 * real for wait, real in pairs)


@pytest.mark.parametrize("max_tokens", [100, 10_000])
def test_what_a_cold_engine_predicts_is_not_what_requests_declare(max_tokens: int) -> None:
    jobs = [Job(0.05 * i, 64, 100, max_tokens=max_tokens) for i in range(120)]
    world = Watched(LaneBacklog(), slots=32)
    run = drive(world, jobs)
    assert max(world.waits) < 8 * max(record.ttft for record in run.records)


def request(id: int, lane: str = "", group: int = 0) -> Request:
    return Request(id, [1] * 10, SamplingParams(max_tokens=10), lane=lane, group=group)


def filled(shares: dict[str, float], cap: int = 1 << 30) -> LaneBacklog:
    backlog = LaneBacklog(shares, cap)
    backlog._each = 1.0  # seconds of each request
    return backlog


def test_a_lane_waits_for_its_own_requests_at_its_own_share() -> None:
    backlog = filled({"interactive": 80.0, "batch": 20.0})
    for id in range(10):
        backlog.push(request(id, "batch"), (0.0,))
    assert backlog.wait("batch") == pytest.approx(10.0)
    assert backlog.wait("interactive") == 0.0
    backlog.push(request(10, "interactive"), (0.0,))
    assert backlog.wait("batch") == pytest.approx(50.0)
    assert backlog.wait("interactive") == pytest.approx(1.25)
    for id in range(10):
        backlog.remove(id)
    assert backlog.wait("interactive") == pytest.approx(1.0)


def test_answers_of_one_request_beyond_its_share_are_not_waited_for() -> None:
    backlog = filled({}, cap=4)
    for id in range(1, 101):
        backlog.push(request(id, group=1), (0.0,))
    backlog.push(request(200, group=2), (0.0,))
    assert backlog.wait("") == pytest.approx(5.0)
    for id in range(1, 99):
        backlog.remove(id)
    assert backlog.wait("") == pytest.approx(3.0)
    for id in (99, 100, 200):
        backlog.remove(id)
    assert backlog.wait("") == 0.0
    assert not backlog._groups
    assert not backlog._places


def test_news_come_at_intervals_and_before_the_engine_rests() -> None:
    world = Watched(LaneBacklog(), slots=1)
    publisher = world.publisher
    assert publisher.news(0.0, 0, 9) == Published(0, 1, 0, 9, 0.0, {"": 0.0})
    assert publisher.news(9.0, 0, 9) is None  # nothing is new
    for id in range(3):
        world.submit(id, Job(0.0, 8, 4))
    world.engine.step()
    first = Publisher(world.scheduler)
    assert (found := first.news(10.0, 2, 9)) is not None
    assert (found.last_id, found.num_free, found.num_waiting) == (2, 0, 2)
    world.engine.step()
    assert first.news(10.004, 3, 9) is None  # too soon
    assert first.news(10.006, 3, 9) is not None
    while world.engine.has_work:
        world.engine.step()
    assert (last := first.news(10.007, 3, 9)) is not None
    assert (last.num_free, last.num_waiting, last.waits) == (1, 0, {"": 0.0})


def test_a_request_that_fills_the_count_leaves_others_their_place() -> None:
    world = Watched(LaneBacklog(group_cap=2), slots=1)
    engine = world.engine
    engine._max_waiting = 8

    def add(id: int, group: int) -> None:
        engine.add(Submit(id, [id + 1] * 4, SamplingParams(max_tokens=4), group=group))

    for id in range(8):
        add(id, 1)
    with pytest.raises(Overloaded, match="8 requests are waiting, the limit"):
        add(8, 1)
    for id in range(9, 15):
        add(id, id)
    with pytest.raises(Overloaded):  # six of them and the two that count of the first
        add(15, 15)
    assert (news := world.publisher.news(1.0, 15, 8)) is not None
    assert (news.num_waiting, news.num_excess, news.group_cap) == (14, 6, 2)


class ListPort:
    """Commands in batches; what is published is kept."""

    def __init__(self, *batches: Sequence[Command]) -> None:
        self.batches = [*batches, [Shutdown()]]
        self.published: list[Published] = []

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        return self.batches.pop(0)

    def send(self, messages: Iterable[Message]) -> None:
        self.published += [message for message in messages if isinstance(message, Published)]


def test_an_engine_that_rests_has_published_that_it_does_however_it_came_to_rest() -> None:
    engine = Watched(LaneBacklog(), slots=1).engine
    submits = [Submit(id, [id] * 4, SamplingParams(max_tokens=4)) for id in (1, 2, 3)]
    port = ListPort(submits, [Abort(id) for id in (1, 2, 3)])
    run(engine, port)
    assert port.published[0].num_waiting == 2
    assert (port.published[-1].num_waiting, port.published[-1].num_free) == (0, 1)


def test_an_engine_that_is_built_caps_requests_and_publishes_waits() -> None:
    config = EngineConfig.of(max_num_seqs=16, fair=True, lanes="interactive=80,batch=20")
    scheduler = build_scheduler(config, 100, EngineMetrics(VirtualClock()))
    policy, backlog = scheduler.state.policy, scheduler.state.waiting.observer
    assert isinstance(policy, Capped)
    assert isinstance(backlog, LaneBacklog)
    assert (policy.slots, backlog.group_cap, backlog.lanes) == (16, 4, ["interactive", "batch"])
    Tuning(config.scheduler, scheduler).change({"max_num_seqs": 8})
    assert policy.slots == 8
    static = build_scheduler(EngineConfig.of(batching="static:4"), 100, EngineMetrics(VirtualClock()))
    assert not isinstance(static.state.policy, Capped)  # a batch is admitted whole


def test_what_is_published_passes_the_wire() -> None:
    published = Published(7, 0, 3, 10, 0.5, {"interactive": 1.5, "batch": 9.0}, True)
    assert FrameReader(is_engine=False).feed(encode(published)) == [published]
