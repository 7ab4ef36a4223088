"""Requests whose KV comes from elsewhere beside what the cache has, and blocks that are kept for readers outside."""

from __future__ import annotations

import pytest

from headway.core.request import Request
from headway.values.events import Preempted
from headway.values.limits import Admission
from headway.values.params import SamplingParams
from headway.values.states import State
from rig import Rig


def held(id: int) -> Request:
    return Request(id, [], SamplingParams(max_tokens=1), state=State.HELD)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loading_request_shares_what_the_cache_has_and_gets_blocks_for_the_rest(depth: int) -> None:
    rig = Rig(num_blocks=16, block_size=4, rows=2, tokens=32, depth=depth)
    rig.add(list(range(8)), 1)
    rig.drain()
    prompt = [*range(8), *range(30, 42)]
    cached = list(rig.ledger.blocks_of(rig.add(prompt, 1, state=State.LOADING).keys))
    req = rig.scheduler.state.live[1]
    assert (req.table[:2], req.published, len(req.table)) == (cached, 2, 5)
    rig.load(req.id, 16)
    assert len(rig.ledger.blocks_of(req.keys)) == 4, "what was loaded is in the cache at once"
    rig.drain()
    rig.verify()
    assert req.num_cached == 16


def test_a_block_is_found_by_its_own_key_as_by_its_chain() -> None:
    rig = Rig(num_blocks=16, block_size=4, rows=2, tokens=32)
    req = rig.add(list(range(13)), 1)
    rig.drain()
    chain = list(rig.ledger.blocks_of(req.keys))
    assert [rig.ledger.block_of(key) for key in req.keys[:3]] == chain
    assert rig.ledger.block_of(b"of nothing") is None


def test_a_load_that_brings_less_than_the_cache_has_keeps_what_the_cache_has() -> None:
    rig = Rig(num_blocks=16, block_size=4, rows=2, tokens=32)
    rig.add(list(range(12)), 1)
    rig.drain()
    req = rig.add([*range(12), 40, 41], 2, state=State.LOADING)
    rig.scheduler.loaded(req.id, 4)
    assert req.num_computed == 12
    rig.drain()
    rig.verify()


def test_the_last_token_of_a_loading_request_is_computed_in_a_block_of_its_own() -> None:
    rig = Rig(num_blocks=16, block_size=4, rows=2, tokens=32)
    rig.add(list(range(8)), 1)
    rig.drain()
    req = rig.add(list(range(8)), 3, state=State.LOADING)
    assert req.published == 1, "not the block that its last token is in"
    rig.load(req.id, 8)
    rig.drain()
    rig.verify()
    assert req.num_cached == 7


def test_the_cached_part_is_not_evicted_to_make_room_for_the_rest() -> None:
    rig = Rig(num_blocks=4, block_size=2, rows=1, tokens=16)
    rig.add([1, 2, 3, 4, 5], 1)
    rig.drain()
    req = rig.add([1, 2, 3, 4, 8, 9], 2, state=State.LOADING)
    assert (req.state, len(set(req.table)), req.published) == (State.LOADING, 3, 2)
    rig.load(req.id, 4)
    rig.drain()
    rig.verify()


def test_where_no_block_is_settled_the_cached_part_is_given_back() -> None:
    rig = Rig(num_blocks=5, block_size=2, rows=2, tokens=16, depth=2, is_late=True)
    rig.add([1, 2, 3], 1)
    rig.drain()
    gone = rig.add([5, 6, 7, 8, 9, 10, 11], 4)
    rig.step()  # in flight: it will write all blocks but the cached one
    rig.abort(gone.id)
    req = rig.add([1, 2, 40, 41], 2, state=State.LOADING)
    assert (req.state, req.table) == (State.WAITING, [])
    rig.drain()
    rig.verify()


def test_held_blocks_are_neither_written_nor_evicted_until_they_are_released() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=2, tokens=16)
    rig.add([1, 2, 3, 4, 5], 1)
    rig.drain()
    keys = rig.add([1, 2, 3, 4, 5], 1).keys
    rig.drain()
    blocks = list(rig.ledger.blocks_of(keys))
    assert len(blocks) == 2
    reader = held(-1)
    rig.scheduler.hold(reader, blocks, until=rig.scheduler.state.now + 1e9)
    before = rig.executor.read(blocks, 4)
    for start in range(10, 40, 10):
        other = rig.add(list(range(start, start + 7)), 2)
        while other.finish is None:
            rig.step()
    assert rig.executor.read(blocks, 4) == before
    rig.scheduler.release(-1)
    rig.scheduler.release(-1)
    assert rig.ledger.pool.available == 6


def test_held_blocks_come_back_when_their_time_is_over() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=2, tokens=16)
    rig.add([1, 2, 3, 4, 5], 1)
    rig.drain()
    keys = rig.add([1, 2, 3, 4, 5], 1).keys
    rig.drain()
    reader = held(-1)
    rig.scheduler.hold(reader, list(rig.ledger.blocks_of(keys)), until=rig.scheduler.state.now + 5)
    assert rig.ledger.pool.available == 4
    rig.scheduler.schedule(rig.scheduler.state.now + 4.9)
    assert rig.ledger.pool.available == 4
    rig.scheduler.schedule(rig.scheduler.state.now + 5)
    assert (rig.ledger.pool.available, reader.state) == (6, State.DONE)


@pytest.mark.parametrize(
    "rules", [{"admission": Admission.RESERVE}, {"preemptions": 0}], ids=["reserve", "no preemption"]
)
def test_a_hold_takes_nothing_that_is_reserved(rules: dict[str, object]) -> None:
    rig = Rig(num_blocks=10, block_size=4, rows=2, tokens=64, **rules)
    keys = rig.add(list(range(16)), 1).keys
    rig.drain()
    rig.add([50, 51, 52, 53], 13)
    rig.add([60, 61, 62, 63], 13)
    rig.step()
    rig.step()
    assert (rig.scheduler.num_running, rig.ledger.num_idle) == (2, 4)
    num_spare = rig.ledger.num_free - rig.ledger.num_reserved
    assert num_spare == 2
    reader = held(-1)
    chain = list(rig.ledger.blocks_of(keys))
    rig.scheduler.hold(reader, chain, until=rig.now + 40)
    assert reader.table == chain[:num_spare]
    none = held(-2)
    rig.scheduler.hold(none, chain[num_spare:], until=rig.now + 40)
    assert none.table == []
    again = held(-3)
    rig.scheduler.hold(again, chain, until=rig.now + 40)
    assert again.table == chain[:num_spare], "what is held already takes nothing more"
    rig.drain()
    rig.verify()
    assert not rig.log.of(Preempted)
