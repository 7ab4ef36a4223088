"""Overload: refusals come from the API process at once, say truly when to come back, and leave every tenant a place."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from echo_engine import EchoEngine
from headway.engine.published import Published
from headway.errors import Overloaded, RequestError
from headway.serve.intent import Intent
from headway.serve.overload import QueueGuard
from headway.serve.problem import Problem, problem_of
from headway.values.params import Slo
from serve_harness import serving
from tenant_kit import ask


class Middle(random.Random):
    """No jitter."""

    def random(self) -> float:
        return 0.5


def guard(max_queue_s: float = 10.0) -> QueueGuard:
    return QueueGuard(max_queue_s, Middle())


def late(guard: QueueGuard, published: Published, intent: Intent | None = None, num_answers: int = 1) -> float | None:
    """What a refusal says about coming back; None: it is taken."""
    try:
        guard.check(published, intent or Intent(), num_answers)
    except Overloaded as error:
        return error.retry_after_s
    return None


def late_at(guard: QueueGuard, wait_s: float) -> float | None:
    """Likewise, of a queue with so long a wait."""
    return late(guard, Published(num_waiting=9, each_s=0.1, waits={"": wait_s}))


def test_a_refusal_does_not_wait_for_the_engines_step() -> None:
    valve, begun = threading.Event(), threading.Event()
    valve.set()

    def step() -> None:
        begun.set()
        assert valve.wait(60)

    engine = EchoEngine(on_step=step)
    engine.published = Published(last_id=1, num_waiting=7, each_s=5.0, waits={"": 35.0})
    with serving(engine) as server:
        assert ask(server, "any")[0] == 200
        valve.clear()
        begun.clear()
        thread = threading.Thread(target=ask, args=(server, "any"))  # in the engine before it says that it is full
        engine.published = None
        server.client.published = None
        thread.start()
        assert begun.wait(20)
        server.client.published = Published(last_id=2, num_waiting=7, each_s=5.0, waits={"": 35.0})
        num_submits = len(engine.submits)
        status, headers, body = ask(server, "any")  # the engine is in the middle of a step, and stays there
        assert (status, body["error"]["type"]) == (503, "service_unavailable_error")
        assert body["error"]["code"] == "server_is_overloaded"
        assert "would wait about 35 s; the limit is 10 s" in body["error"]["message"]
        assert 20 <= int(headers["retry-after"]) <= 30
        assert 20_000 <= int(headers["retry-after-ms"]) <= 30_000
        assert len(engine.submits) == num_submits
        valve.set()
        thread.join(20)


def test_the_bound_is_on_the_predicted_wait_and_the_time_to_come_back_is_the_rest() -> None:
    assert late(guard(), Published(num_waiting=900, each_s=0.01, waits={"": 9.0})) is None
    assert late(guard(), Published(num_waiting=4, each_s=10.0, waits={"": 40.0})) == pytest.approx(30.0)
    assert late(guard(2.0), Published(num_waiting=3, each_s=1.0, waits={"": 3.0})) == pytest.approx(1.0)
    assert late(guard(), Published(num_waiting=10, max_waiting=10, each_s=0.5, waits={"": 5.0})) == 1.0
    guard().check(None, Intent())  # an engine that says nothing is not overloaded


def test_lanes_are_bounded_apart() -> None:
    full = Published(num_waiting=90, each_s=0.5, waits={"interactive": 2.0, "batch": 43.0})
    assert late(guard(), full, Intent(lane="interactive")) is None
    assert late(guard(), full, Intent(lane="batch")) == pytest.approx(33.0)


def test_what_is_on_its_way_to_the_engine_counts() -> None:
    one = guard()
    published = Published(last_id=0, num_free=2, each_s=6.0, waits={"": 0.0})
    for id in (1, 2, 3):  # two of them find a slot
        assert late(one, published) is None
        one.sent(id, "")
    one.sent(4, "")
    assert late(one, published) == pytest.approx(2.0)
    assert late(one, Published(last_id=4, num_free=1, each_s=6.0, waits={"": 0.0})) is None
    for id in (1, 2, 3, 4, 4):
        one.begun(id)
    assert not one._sent
    assert not one._waiting
    assert not one._by_tenant


def test_a_tenant_that_fills_the_queue_does_not_lock_the_others_out() -> None:
    one = guard()
    for id in range(1, 41):
        one.sent(id, "hog")
    full = Published(last_id=40, num_waiting=40, each_s=0.3, waits={"": 12.0})
    assert late(one, full, Intent(tenant="hog")) is not None
    assert late(one, full, Intent(tenant="ann")) is None
    for id in range(41, 58):
        one.sent(id, "ann")
    fuller = Published(last_id=57, num_waiting=57, each_s=0.3, waits={"": 17.1})
    assert late(one, fuller, Intent(tenant="ann")) == 1.0  # it has its half of the ten seconds
    assert late(one, fuller, Intent(tenant="bob")) is None
    assert (
        late(one, Published(last_id=57, num_waiting=80, each_s=0.3, waits={"": 24.0}), Intent(tenant="bob")) is not None
    )


def test_answers_that_others_go_before_take_no_place_from_them() -> None:
    full = Published(num_waiting=1024, max_waiting=1024, each_s=0.5, waits={"": 1.0}, num_excess=1008, group_cap=16)
    assert late(guard(), full) is None
    assert late(guard(), full, num_answers=16) is None
    assert late(guard(), full, num_answers=17) is not None  # as large as the one that filled the queue
    assert late(guard(), Published(max_waiting=1024, waits={"": 0.0}, group_cap=16), num_answers=1024) is None
    with pytest.raises(RequestError, match="asks for 1025 answers; allowed: up to 1024"):
        guard().check(Published(max_waiting=1024, waits={"": 0.0}), Intent(), 1025)


def test_a_request_that_would_miss_its_objective_is_shed_at_once_where_the_policy_sheds() -> None:
    intent = Intent(slo=Slo(ttft=1.0))
    queue: dict[str, Any] = {"num_waiting": 5, "each_s": 0.4, "waits": {"": 2.0}}
    guard().check(Published(**queue), intent)
    with pytest.raises(Problem) as caught:
        guard().check(Published(**queue, sheds=True), intent)
    assert (caught.value.status, caught.value.code) == (429, "deadline_unreachable")
    assert caught.value.headers["retry-after"] == "2"  # until half of the objective is left


def test_clients_are_told_to_come_back_at_different_times_within_a_minute() -> None:
    one = QueueGuard(10.0, random.Random(7))
    waits = [one.overloaded("it is full", 20.0).retry_after_s for _ in range(200)]
    assert 16 <= min(waits) < 17
    assert 23 < max(waits) <= 24
    for wait_s, header in ((0.01, "1"), (1e9, "60"), (1.2, "2")):
        problem = problem_of(Overloaded("it is full", retry_after_s=wait_s))
        assert problem.headers["retry-after"] == header


def test_a_queue_below_its_bound_is_no_overload_however_long_it_stands() -> None:
    """Clients that wait for their answers before they ask again keep it there."""
    now = 0.0
    one = QueueGuard(10.0, Middle(), lambda: now)
    for tenth in range(600):
        now = tenth / 10
        assert late_at(one, 9.9) is None


def test_a_queue_that_stays_full_is_standing_after_two_seconds() -> None:
    now = 0.0
    one = QueueGuard(10.0, Middle(), lambda: now)
    for tenth in range(21):
        now = tenth / 10
        assert late_at(one, 10.1) == 1.0
    now = 2.15
    assert late_at(one, 10.1) == 1.0
    for second in range(9):
        now = 2.2 + second
        assert late_at(one, 9.9 - second) == pytest.approx(max(1.0, 9.85 - second))
    assert late_at(one, 0.04) is None
    now = 12.3  # two seconds without a refusal
    assert late_at(one, 9.9) is None
    now = 30.0
    assert late_at(one, 10.1) == 1.0  # once in a while is no load to speak of
    now = 30.5
    assert late_at(one, 9.9) is None


def test_after_an_overload_a_burst_may_fill_the_queue_again() -> None:
    now = 0.0
    one = QueueGuard(2.0, Middle(), lambda: now)
    for tenth in range(50):
        now = tenth / 10
        assert late_at(one, 2.5) is not None
    assert late_at(one, 0.2) is not None
    for tenth in range(20):
        now = 60.0 + tenth / 10
        assert late_at(one, 1.9 - tenth / 20) is None


def test_old_news_refuse_nothing() -> None:
    """The wait that was published is over, and an engine that lives would have said so."""
    now = 0.0
    one = QueueGuard(10.0, Middle(), lambda: now)
    news = Published(num_waiting=9, each_s=1.0, waits={"": 19.0})
    assert late(one, news) == pytest.approx(9.0)
    now = 28.0
    assert late(one, news) is not None
    now = 30.0
    assert late(one, news) is None
    assert late(one, Published(num_waiting=9, each_s=1.0, waits={"": 18.0})) == pytest.approx(8.0)


def test_answers_to_one_request_are_one_group_and_those_to_another_are_not() -> None:
    engine = EchoEngine()
    with serving(engine) as server:
        assert ask(server, "any", prompt=["a", "b"], n=3)[0] == ask(server, "any")[0] == 200
    groups = [submit.group for submit in engine.submits]
    assert groups == [groups[0]] * 6 + [groups[6]]
    assert 0 != groups[0] != groups[6] != 0
