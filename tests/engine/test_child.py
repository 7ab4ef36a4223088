"""The engine's loop over a port of lists: what is sent when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.test_engine import make

from echo_engine import EchoEngine
from headway.core.policy import Policy
from headway.core.request import Request
from headway.engine.child import run
from headway.engine.client import Output, Submit
from headway.engine.clock import VirtualClock
from headway.engine.messages import BlockNews, Command, Message, Shutdown
from headway.errors import Unreachable
from headway.values.params import SamplingParams, Slo
from headway.values.plan import Emission
from headway.values.states import State


class Strict(EchoEngine):
    def add(self, submit: Submit) -> None:
        if submit.slo.ttft is not None:
            raise Unreachable("not by then", retry_after_s=2.5)
        super().add(submit)


class ListPort:
    def __init__(self, *batches: Sequence[Command]) -> None:
        self.happened: list[object] = []
        self._batches = list(batches)

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        return self._batches.pop(0)

    def send(self, messages: Iterable[Message]) -> None:
        self.happened += messages


def test_a_refusal_is_sent_before_the_next_step_of_the_others() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    port = ListPort([Submit(1, [7], params), Submit(2, [7], params, slo=Slo(ttft=0.1))], [Shutdown()])
    run(Strict(on_step=lambda: port.happened.append("step")), port)
    refused, step, told = port.happened
    assert refused == Output(2, finish="shed", error="not by then", retry_after_s=2.5)
    assert step == "step"
    assert isinstance(told, Emission)
    assert (told.ids, told.tokens, [(end.id, end.finish) for end in told.finished]) == ([1], [7], [(1, "length")])


class Evicting(EchoEngine):
    def block_news(self) -> BlockNews | None:
        return BlockNews(removed=[b"of the prompt"]) if self.num_steps else None


def test_blocks_that_went_are_told_before_what_ended_without_them() -> None:
    """A front compares what an engine found of a prompt with what it said to have until then."""
    port = ListPort([Submit(1, [7], SamplingParams(max_tokens=1, temperature=0.0))], [Shutdown()])
    run(Evicting(), port)
    news, told, *_ = port.happened
    assert isinstance(news, BlockNews)
    assert isinstance(told, Emission)
    assert [end.id for end in told.finished] == [1]


class Fussy(Policy):
    """A plug-in with a fault: it raises for one request when it asks for its place."""

    def key(self, req: Request) -> tuple[float, ...]:
        if req.id == 2:
            raise ZeroDivisionError("a plug-in's own fault")
        return super().key(req)


def test_a_request_that_raises_on_its_way_in_fails_alone_and_leaves_nothing() -> None:
    engine, _ = make(policy=Fussy())
    params = SamplingParams(max_tokens=1, temperature=0.0)
    port = ListPort([Submit(id, [7, 8, 9], params) for id in (1, 2, 3)], [], [], [Shutdown()])
    run(engine, port)
    outputs = [message for message in port.happened if isinstance(message, Output)]
    assert [(output.id, output.finish, output.code) for output in outputs] == [(2, "error", None)]
    assert "ZeroDivisionError" in (outputs[0].error or "")
    ended = [end.id for message in port.happened if isinstance(message, Emission) for end in message.finished]
    assert sorted(ended) == [1, 3]
    assert not engine.has_work
    assert not engine.scheduler.state.live
    assert engine.scheduler.state.ledger.num_free == 32


class WaitingPort(ListPort):
    """Nothing ever arrives. A wait with an end passes; one without an end, or the last of `most`, ends the loop."""

    def __init__(self, clock: VirtualClock, most: int) -> None:
        super().__init__([])
        self.waits: list[float] = []
        self._clock = clock
        self._most = most

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        if self._batches:
            return super().receive(timeout_s)
        if timeout_s is None or len(self.waits) == self._most:
            return [Shutdown()]
        self.waits.append(timeout_s)
        self._clock.advance(timeout_s)
        return []


def test_an_idle_engine_wakes_once_when_the_next_lease_ends() -> None:
    engine, executor = make()
    held = Request(1, [1, 2, 3], SamplingParams(max_tokens=1), lease_s=5.0)
    loading = Request(2, [4, 5, 6], SamplingParams(max_tokens=1), state=State.LOADING)
    engine.scheduler.add(held)
    engine.scheduler.add(loading, lease_s=9.0)
    port = WaitingPort(executor._clock, most=20)
    run(engine, port)
    assert (held.state, loading.state) == (State.DONE, State.DONE)
    assert engine.scheduler.state.ledger.pool.available == 32
    assert port.waits == [0.0, 5.0, 3.0, 0.0], "a step of one second, two leases, the step of what was not loaded"


def test_an_engine_whose_requests_wait_for_the_outside_looks_again_soon() -> None:
    engine, executor = make()
    engine.scheduler.state.gate = type("Shut", (), {"is_barrier": False, "num_slots": lambda *_: 0})()
    engine.add(Submit(1, [1], SamplingParams(max_tokens=1)))
    port = WaitingPort(executor._clock, most=3)
    run(engine, port)
    assert port.waits == [0.005, 0.005, 0.005]


class AskedPort(ListPort):
    def __init__(self, *batches: Sequence[Command]) -> None:
        super().__init__(*batches)
        self.waits: list[float | None] = []

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        self.waits.append(timeout_s)
        return super().receive(timeout_s)


def test_what_can_be_done_ahead_is_done_while_nothing_else_is_to_do() -> None:
    engine = EchoEngine()
    engine.num_unprepared = 4
    prepared: list[int] = []
    engine._on_step = lambda: prepared.append(engine.num_prepared)
    submit = Submit(1, [7], SamplingParams(max_tokens=2, temperature=0.0))
    port = AskedPort([], [submit], [], [], [], [Shutdown()])
    run(engine, port)
    assert prepared == [2, 2], "not while there are requests"
    assert engine.num_prepared == 4
    assert port.waits == [0.0, 0.0, 0.0, 0.0, 0.0, None], "no wait until all of it is done"
