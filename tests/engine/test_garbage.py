"""Garbage: collected while a plan is with the executor, and never what was there when the engine was built."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from engine.test_tuning import engine

from headway.engine import garbage
from headway.engine.client import Submit
from headway.values.params import SamplingParams


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def test_an_engine_collects_while_its_executor_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine()
    executor, is_computing, seen = subject._executor, False, []
    submit, collect = executor.submit, executor.collect

    def begin(plan) -> None:
        nonlocal is_computing
        submit(plan)
        is_computing = True

    def end():
        nonlocal is_computing
        is_computing = False
        return collect()

    monkeypatch.setattr(executor, "submit", begin)
    monkeypatch.setattr(executor, "collect", end)
    monkeypatch.setattr(garbage, "YOUNG", 500)
    garbage.settle_garbage(has_loop=True)
    watch = lambda phase, info: seen.append(is_computing) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(watch)
    try:
        kept = []
        for id in range(40):
            subject.add(Submit(id, [1 + id % 90] * 8, SamplingParams(max_tokens=6)))
            while subject.has_work:
                kept.append([[] for _ in range(20)])  # what survives, as requests that wait do
                subject.step()
    finally:
        gc.callbacks.remove(watch)
    assert len(seen) > 5
    assert all(seen)


def test_a_process_without_a_loop_collects_by_itself() -> None:
    garbage.settle_garbage()
    assert gc.get_threshold()[0] == garbage.YOUNG
    garbage.settle_garbage(has_loop=True)
    assert gc.get_threshold()[0] > 10 * garbage.YOUNG


def test_survivors_are_looked_at_too_though_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(garbage, "YOUNG", 1)
    monkeypatch.setattr(garbage, "OLD", 3)
    garbage.settle_garbage(has_loop=True)
    watch = lambda phase, info: seen.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(watch)
    try:
        kept = []
        for _ in range(8):
            kept.append([[] for _ in range(9)])
            garbage.collect_young()
    finally:
        gc.callbacks.remove(watch)
    assert seen == [0, 0, 0, 1, 0, 0, 0, 1]


def test_where_the_process_has_switched_collection_off_it_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "YOUNG", 1)
    seen: list[str] = []
    watch = lambda phase, info: seen.append(phase)  # noqa: E731
    gc.callbacks.append(watch)
    gc.disable()
    try:
        kept = [[] for _ in range(9)]
        garbage.collect_young()
    finally:
        gc.enable()
        gc.callbacks.remove(watch)
    assert len(kept) == 9
    assert not seen
