"""One engine and several fronts: ids, parents and groups of one are never those of another."""

from __future__ import annotations

from headway.cluster.fronts import Front, FrontsPort
from headway.engine.client import EngineInfo, Submit
from headway.engine.messages import AdaptersNow, Joining, LoadAdapter, Message, Ready, UnloadAdapter
from headway.engine.wire import FrameReader
from headway.values.params import SamplingParams

INFO = EngineInfo("echo", 512, 320, 16, 64, 8)


def submit(id: int, parent: int | None = None, group: int = 0) -> Submit:
    return Submit(id, [65, 66], SamplingParams(n=2), parent=parent, group=group)


def taken(port: FrontsPort, front: Front, *submits: Submit) -> list[Submit]:
    """These as the engine gets them."""
    for each in submits:
        port.put(front, each)
    commands = port.receive(0)
    assert all(isinstance(each, Submit) for each in commands)
    return commands  # type: ignore[return-value]


def two_fronts() -> tuple[FrontsPort, Front, Front]:
    port = FrontsPort("x", "i", 1, lambda: None)
    port.send([Ready(INFO)])
    fronts = [Front(number, "here", lambda raw: None) for number in (1, 2)]
    for front in fronts:
        port.attach(front)
    assert port.receive(0) == []
    return port, *fronts


def test_an_answer_is_told_the_engines_id_of_the_one_it_shares_its_prompt_with() -> None:
    port, one, two = two_fronts()
    for front in (one, two):
        first, second = taken(port, front, submit(7), submit(8, parent=7))
        assert (first.parent, second.parent) == (None, first.id)
        assert first.id not in (7, 8), "another number than the front's, or this shows nothing"


def test_an_answer_whose_first_one_is_over_or_is_of_another_front_has_none_to_share_with() -> None:
    port, one, two = two_fronts()
    taken(port, one, submit(7))
    (alone,) = taken(port, two, submit(8, parent=7))
    assert alone.parent is None


def test_groups_of_two_fronts_are_two_groups() -> None:
    port, one, two = two_fronts()
    same = taken(port, one, submit(7, group=5), submit(8, parent=7, group=5), submit(9, group=6))
    other, none = taken(port, two, submit(7, group=5), submit(8))
    assert same[0].group == same[1].group
    assert len({same[0].group, same[2].group, other.group}) == 3
    assert none.group == 0, "what asked for nothing else is in no group"


def test_what_one_front_loads_all_are_told_and_so_are_those_that_come_later() -> None:
    port = FrontsPort("x", "i", 1, lambda: None)
    port.send([Ready(INFO)])
    told: list[list[Message]] = [[], [], []]
    fronts = []
    for number, heard in enumerate(told):
        frames = FrameReader(is_engine=False)
        fronts.append(Front(number, "here", lambda raw, heard=heard, frames=frames: heard.extend(frames.feed(raw))))
    for front in fronts[:2]:
        port.attach(front)
    port.put(fronts[0], LoadAdapter(7, "x", "/a", "d"))
    port.put(fronts[1], UnloadAdapter(7, "y"))
    load, unload = port.receive(0)
    assert load == LoadAdapter(load.ticket, "x", "/a", "d")
    assert unload == UnloadAdapter(unload.ticket, "y")
    assert load.ticket != unload.ticket
    port.send([AdaptersNow(load.ticket, {"x": "d"})])
    port.send([AdaptersNow(unload.ticket, {"x": "d"}, "no")])
    assert told[0][1:] == [AdaptersNow(7, {"x": "d"}), AdaptersNow(0, {"x": "d"})]
    assert told[1][1:] == [AdaptersNow(0, {"x": "d"}), AdaptersNow(7, {"x": "d"}, "no")]
    port.attach(fronts[2])
    port.receive(0)
    (joining,) = told[2]
    assert isinstance(joining, Joining)
    assert joining.info.adapters == {"x": "d"}
