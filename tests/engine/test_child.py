"""The engine's loop over a port of lists: what is sent when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo_engine import EchoEngine
from headway.engine.child import run
from headway.engine.client import Output, Submit
from headway.engine.messages import Command, Message, Shutdown, Tokens
from headway.errors import Unreachable
from headway.values.params import SamplingParams, Slo


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


def test_whoever_is_refused_is_told_before_the_next_step_of_the_others() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    port = ListPort([Submit(1, [7], params), Submit(2, [7], params, slo=Slo(ttft=0.1))], [Shutdown()])
    run(Strict(on_step=lambda: port.happened.append("step")), port)
    refused, step, tokens, end = port.happened
    assert refused == Output(2, finish="shed", error="not by then", retry_after_s=2.5)
    assert step == "step"
    assert tokens == Tokens([1], [7])
    assert isinstance(end, Output)
    assert end.finish == "length"
