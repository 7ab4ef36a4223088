"""KV in and out of the pool beside the plans: what is loaded is right, and whatever goes wrong is computed instead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from headway.core.preemption import preempt
from headway.engine.arrivals import ArrivedBlock
from headway.engine.clock import VirtualClock
from headway.engine.decisions import DecisionJournal
from headway.engine.tier.disk import DiskTier
from headway.engine.tier.host import HostTier
from headway.engine.tier.keeper import BlockKeeper
from headway.values.states import State
from moving import BLOCK, BLOCK_BYTES, Moving

PROMPT = [(7 * i) % 50 for i in range(42)]


def keeper(folder: Path, host_bytes: int = 0) -> BlockKeeper:
    disk = DiskTier(folder / "kv", 1 << 20, bytes(32), BLOCK_BYTES)
    return BlockKeeper(HostTier(host_bytes) if host_bytes else None, disk)


class Sluggish:
    """A tier that has everything; what it is asked for arrives when and as the test says."""

    def __init__(self) -> None:
        self.asked: dict[int, list[bytes]] = {}
        self.cancelled: list[int] = []
        self.arrivals: deque[ArrivedBlock] = deque()
        self.stored: dict[bytes, bytes] = {}

    def wake(self) -> None:
        pass

    def num_held(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def wants(self, key: bytes, num_bytes: int) -> bool:
        return key not in self.stored

    def store(self, key: bytes, data: memoryview) -> None:
        self.stored[key] = bytes(data)

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        self.asked[ticket] = list(keys)

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def take(self, most: int) -> list[ArrivedBlock]:
        return [self.arrivals.popleft() for _ in range(min(most, len(self.arrivals)))]

    @property
    def has_arrivals(self) -> bool:
        return bool(self.arrivals)

    def close(self) -> None:
        pass

    def send(self, ticket: int, *indexes: int, ends: bool = False) -> None:
        keys = self.asked[ticket]
        self.arrivals += [ArrivedBlock(ticket, index, self.stored[keys[index]]) for index in indexes]
        if ends:
            self.arrivals.append(ArrivedBlock(ticket, len(keys), None))


def warm(tier: Sluggish) -> None:
    """The tier holds the prompt's blocks."""
    one = Moving(tier=tier)
    one.mover._tier = None  # nothing is loaded for the one that fills it
    one.add(1, PROMPT)
    one.mover._tier = tier
    one.mover._fresh = {}
    one.run(1)
    assert len(tier.stored) >= len(PROMPT) // BLOCK


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_another_engine_takes_the_prefix_from_the_tier_and_gives_the_same_tokens(
    tmp_path: Path, depth: int, host_bytes: int
) -> None:
    tier = keeper(tmp_path, host_bytes)
    one = Moving(tier=tier)
    one.add(1, PROMPT)
    one.run(1)
    assert one.is_right(1, PROMPT)
    one.engine.close()
    two = Moving(tier=keeper(tmp_path, host_bytes), depth=depth, is_late=depth > 1)
    two.add(2, [*PROMPT[:30], 49, 48], 5)
    two.run(2)
    assert two.is_right(2, [*PROMPT[:30], 49, 48], 5)
    assert two.ended[2].cached_tokens == 28
    assert (two.engine.stats().tokens_from_tier, two.executor.computed_tokens) == (28, 4 + 4)
    assert two.num_free == 64
    two.engine.close()


def test_only_what_the_cache_lacks_is_loaded(tmp_path: Path) -> None:
    tier = keeper(tmp_path)
    one = Moving(tier=tier)
    one.add(1, PROMPT)
    one.run(1)
    assert tier.settle()
    one.engine.close()
    tier = keeper(tmp_path)
    two = Moving(tier=tier)
    two.add(2, PROMPT[:16], 1)
    two.run(2)
    loaded = two.engine.stats().tokens_from_tier
    two.add(3, PROMPT)
    two.run(3)
    assert two.engine.stats().tokens_from_tier - loaded == 40 - 16
    assert two.is_right(3, PROMPT)
    assert two.ended[3].cached_tokens == 40
    two.engine.close()


def test_blocks_that_were_evicted_come_back_from_the_tier(tmp_path: Path) -> None:
    tier = keeper(tmp_path)
    one = Moving(tier=tier, num_blocks=14)
    one.add(1, PROMPT)
    one.run(1)
    for id in range(2, 8):
        prompt = [id] * 40
        one.add(id, prompt)
        one.run(id)
    assert tier.settle()
    one.add(9, PROMPT)
    one.run(9)
    assert one.is_right(9, PROMPT)
    assert one.engine.stats().tokens_from_tier >= 24
    one.engine.close()


@pytest.mark.parametrize(
    ("indexes", "num_loaded"),
    [((), 0), ((0,), 1), ((0, 1, 2), 3), ((1, 2), 0), ((2, 1, 0), 3), ((0, 0, 1, 1), 2), ((*range(10), 0), 10)],
)
def test_what_came_without_a_gap_counts_in_whatever_order(indexes: tuple[int, ...], num_loaded: int) -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier)
    two.add(2, PROMPT)
    (ticket,) = tier.asked
    tier.send(ticket, *indexes, ends=True)
    two.run(2)
    assert two.is_right(2, PROMPT)
    assert (two.ended[2].cached_tokens, two.engine.stats().tokens_from_tier) == (num_loaded * BLOCK,) * 2
    assert two.engine.stats().failed_loads == (num_loaded < 10)
    assert tier.cancelled == [], "the source is done with it, and would remember that for ever"
    assert two.num_free == 64


def test_a_block_of_another_length_or_number_is_not_taken() -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier)
    two.add(2, PROMPT)
    (ticket,) = tier.asked
    good = tier.stored[tier.asked[ticket][1]]
    tier.arrivals += [
        ArrivedBlock(ticket, 0, good[:-1]),
        ArrivedBlock(ticket, -1, good),
        ArrivedBlock(ticket, 99, good),
    ]
    tier.send(ticket, 1, ends=True)
    two.run(2)
    assert two.is_right(2, PROMPT)
    assert two.ended[2].cached_tokens == 0


def test_what_arrives_after_an_abort_is_written_nowhere() -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier, num_blocks=16)
    two.add(2, PROMPT)
    (ticket,) = tier.asked
    tier.send(ticket, 0, 1)
    two.step()
    assert two.scheduler.state.live[2].state is State.LOADING
    assert two.engine.abort(2) is not None
    assert two.num_free == 16
    tier.num_held = lambda keys: 0  # type: ignore[method-assign]
    two.add(3, [9] * 50)  # takes the same blocks
    tier.send(ticket, *range(2, 10), ends=True)
    two.run(3)
    assert two.is_right(3, [9] * 50)
    assert ticket in tier.cancelled


@pytest.mark.parametrize("others", [0, 9], ids=["idle", "beside requests that wait"])
def test_the_time_until_its_kv_came_is_that_of_loading(others: int) -> None:
    tier, clock, journal = Sluggish(), VirtualClock(), DecisionJournal()
    warm(tier)
    two = Moving(tier=tier, clock=clock)
    two.engine.metrics.journal = journal
    clock.advance(100.0)
    for id in range(10, 10 + others):  # one more than there are rows
        two.add(id, [id], 40)
    two.add(2, PROMPT)
    ticket = max(tier.asked)
    two.step()
    clock.advance(5.0)
    tier.send(ticket, *range(10), ends=True)
    two.run(2, *range(10, 10 + others))
    told = journal.explain(2, clock.now())
    assert told is not None
    assert told.parts_s["loading"] == pytest.approx(5.0)
    assert sum(told.parts_s.values()) == pytest.approx(told.total_s)


def test_a_load_that_does_not_come_is_computed_when_its_lease_ends() -> None:
    tier, clock = Sluggish(), VirtualClock()
    warm(tier)
    two = Moving(tier=tier, clock=clock)
    two.add(2, PROMPT)
    (ticket,) = tier.asked
    tier.send(ticket, 0, 1, 2)
    for _ in range(5):
        two.step()
    assert two.scheduler.state.live[2].state is State.LOADING
    clock.advance(10.0)
    two.step()
    tier.send(ticket, *range(3, 10))  # too late
    two.run(2)
    assert two.is_right(2, PROMPT)
    assert two.num_free == 64


def test_a_request_that_was_loaded_may_be_preempted(tmp_path: Path) -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier)
    two.add(2, PROMPT, 8)
    (ticket,) = tier.asked
    tier.send(ticket, *range(10))
    while len(two.answers[2]) < 3:
        two.step()
    preempt(two.scheduler.state, two.scheduler.state.live[2])
    two.run(2)
    assert two.is_right(2, PROMPT, 8)


def test_answers_to_one_prompt_load_it_once() -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier)
    two.add(2, PROMPT)
    two.add(3, PROMPT, parent=2)
    (ticket,) = tier.asked
    tier.send(ticket, *range(10))
    two.run(2, 3)
    assert two.is_right(2, PROMPT)
    assert two.is_right(3, PROMPT)


def test_where_there_is_no_room_to_receive_it_is_computed() -> None:
    tier = Sluggish()
    warm(tier)
    two = Moving(tier=tier, num_blocks=14)
    tier.num_held = lambda keys: 0  # type: ignore[method-assign]
    two.add(2, [9] * 30, 8)
    two.step()
    tier.num_held = len  # type: ignore[method-assign]
    two.add(3, PROMPT)
    assert not tier.asked
    two.run(2, 3)
    assert two.is_right(3, PROMPT)


def test_a_hold_ends_before_its_blocks_are_given_on() -> None:
    clock = VirtualClock()
    one = Moving(clock=clock, num_blocks=16)
    one.add(1, PROMPT)
    one.run(1)
    hold = one.mover.hold(list(one.ledger.index.key_of.values())[:3], 5.0, clock.now())
    assert len(hold.blocks) == 3
    buffer = memoryview(bytearray(BLOCK_BYTES))
    assert one.mover.copy_out(hold, 2, buffer)
    clock.advance(4.9)
    one.step()
    assert one.mover.copy_out(hold, 2, buffer)
    clock.advance(0.2)
    one.step()
    assert not one.mover.copy_out(hold, 2, buffer)
    assert one.num_free == 16
    one.mover.release(hold)  # late, and twice: nothing happens
    one.mover.release(hold)
    assert one.num_free == 16


def test_a_hold_has_the_blocks_that_could_be_held() -> None:
    one = Moving()
    one.add(1, PROMPT)
    one.run(1)
    keys = list(one.ledger.index.key_of.values())[:10]
    one.ledger.num_reserved = 64 - 3
    assert len(one.mover.hold(keys, 5.0, one.clock.now()).blocks) == 3
    assert (one.num_free, one.mover.hold(keys[3:], 5.0, one.clock.now()).blocks) == (61, [])
    assert len(one.scheduler.state.leases) == 1


def test_a_hold_is_released_at_once() -> None:
    one = Moving()
    one.add(1, PROMPT)
    one.run(1)
    hold = one.mover.hold(list(one.ledger.index.key_of.values())[:10], 5.0, one.clock.now())
    assert one.num_free == 54
    one.mover.done(hold)
    assert one.engine.has_work
    one.step()
    assert (one.num_free, hold.is_valid) == (64, False)
    assert one.mover.hold([b"?" * 32], 5.0, one.clock.now()).blocks == []
    assert not one.scheduler.state.leases


def test_an_engine_that_does_not_answer_in_time_holds_nothing() -> None:
    one = Moving()
    assert one.mover.ask([b"?" * 32], 5.0, 0.0) is None
    one.step()
    assert not one.scheduler.state.live
