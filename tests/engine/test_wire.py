"""Frames: every value survives the wire, and bytes that are no frames end the connection instead of hanging it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import EngineConfig
from headway.engine.client import CacheHit, EngineInfo, Output, RequestTiming, Stats, Submit
from headway.engine.explain import ChunkNote, Explanation, Meanwhile, PreemptionNote, ReasonNote, WaitNote
from headway.engine.messages import (
    Abort,
    Alive,
    BlockNews,
    Dismiss,
    Explain,
    Explained,
    Fatal,
    GetStats,
    Joining,
    Leaving,
    LookedUp,
    LookUp,
    PeerGone,
    Ready,
    Reconfigure,
    Reconfigured,
    Shutdown,
    StatsReply,
)
from headway.engine.wire import FrameReader, SocketPort, encode
from headway.values.params import SamplingParams, Slo
from headway.values.plan import Emission, TokenLogprob

PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    logit_bias={3: -1.5},
    stop=["a", "é"],
    stop_token_ids=[7],
    dry_breakers=[4],
    seed=-(2**63),
    logprobs=2,
)
TO_ENGINE = [
    EngineConfig.of(model="x.gguf", block_size=32, depth=2),
    Submit(
        2**63 - 1, [1, 2, 3], PARAMS, seed=2**64 - 1, salt="s", priority=-4, parent=7, namespace=b"\x00n", adapter="a"
    ),
    Submit(
        3, [1], PARAMS, tenant="ann", lane="batch", route="chat", slo=Slo(0.5, None, 9.0), expected=7.5, ceiling=9.0
    ),
    Abort(5, "stop"),
    GetStats(6),
    Reconfigure(7, {"beta": 2.5, "max_num_seqs": 4, "lanes": "a=1", "target_itl_ms": None, "fair": True}),
    Explain(8, 5),
    LookUp(9, Submit(0, [1, 2], PARAMS, namespace=b"n")),
    Shutdown(),
    Dismiss("not wanted", is_refusal=True),
]
FROM_ENGINE = [
    Ready(EngineInfo("m", 100, 320, 16, 10, 4, [0, 2], lanes=("a", "b"))),
    Emission([1, 2, 3], [4, 5, 6], []),
    Emission([1], [4], [Output(1, finish="stop", tokens=[], logprobs=[])], {1: [TokenLogprob(-0.5, ((4, -0.5),))]}),
    Output(1, [4], [TokenLogprob(-0.5, ((4, -0.5), (9, -1.25)))]),
    Output(1, [], [], "error", "bad", "invalid_value", "n", 3, RequestTiming(1.0, 2.0, 3.0)),
    StatsReply(6, Stats(running=1, finished={"stop": 2})),
    Output(1, [], [], finish="length", preemptions=2, tokens_recomputed=9, slo_met=False),
    Reconfigured(7, {"beta": 2.5, "max_num_seqs": 4}),
    Reconfigured(8, {}, "max_num_seqs is 0; allowed: 1 or more"),
    Explained(8, None),
    Explained(
        9,
        Explanation(
            *(5, "done", 2.0, {"slots": 0.5, "decode": 1.5}),
            waits=[WaitNote(0.0, 0.5, [ReasonNote("slots", 3, 0.5)], Meanwhile(3, 8.0))],
            chunks=[ChunkNote(7, 0.5, 0, 16)],
            preemptions=[PreemptionNote(9, 1.0, "memory", 40, True)],
            finish="stop",
        ),
    ),
    LookedUp(10, CacheHit(40, 32, None)),
    Fatal("over", is_config=True),
    BlockNews([b"a"], [b"b"], is_whole=True),
    Joining("n", "i", 7, EngineInfo("m", 100, 320, 16, 10, 4, [0])),
    Alive(3, True, 0.5),
    Leaving(),
]


@pytest.mark.parametrize(("values", "is_engine"), [(TO_ENGINE, True), (FROM_ENGINE, False)])
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_every_value_survives_in_any_split(values: list[object], is_engine: bool, size: int) -> None:
    data = b"".join(encode(value) for value in values)  # type: ignore[arg-type]
    reader = FrameReader(is_engine=is_engine)
    got = [value for at in range(0, len(data), size) for value in reader.feed(data[at : at + size])]
    assert got == values


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_values_or_peer_gone(data: bytes) -> None:
    reader = FrameReader(is_engine=True, max_frame_bytes=1000)
    with contextlib.suppress(PeerGone):
        assert reader.feed(data) == [] or len(data) > 5


@settings(deadline=None)
@given(st.integers(0, len(encode(TO_ENGINE[1])) - 1), st.integers(0, 255))  # type: ignore[arg-type]
def test_one_changed_byte_gives_values_or_peer_gone(at: int, byte: int) -> None:
    frame = bytearray(encode(TO_ENGINE[1]))  # type: ignore[arg-type]
    frame[at] = byte
    with contextlib.suppress(PeerGone):
        FrameReader(is_engine=True).feed(bytes(frame))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff\x07", "allowed"),
        (b"\x00\x00\x00\x00\x07", "allowed"),
        (b"\x02\x00\x00\x00\x09\x90", "version"),
        (b"\x02\x00\x00\x00\x07\xc1", "decode"),
        (encode(FROM_ENGINE[0]), "decode"),  # type: ignore[arg-type]
    ],
)
def test_bad_frame_ends_the_connection_at_once(data: bytes, words: str) -> None:
    with pytest.raises(PeerGone, match=words):
        FrameReader(is_engine=True).feed(data)


def test_port_takes_configuration_first_then_commands() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        port = SocketPort(theirs)
        ours.sendall(b"".join(encode(value) for value in TO_ENGINE))  # type: ignore[arg-type]
        assert port.configuration() == TO_ENGINE[0]
        assert port.receive(None) == TO_ENGINE[1:]
        assert port.receive(0.0) == []
        assert port.receive(0.001) == []


def test_port_refuses_a_connection_that_does_not_begin_with_the_configuration() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode(Abort(1)))
        with pytest.raises(PeerGone, match="began with Abort"):
            SocketPort(theirs).configuration()


def test_port_notices_the_peers_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        port = SocketPort(theirs)
        ours.close()
        with pytest.raises(PeerGone):
            port.receive(None)
        with pytest.raises(PeerGone):
            port.send([Emission([1], [2])])


def test_port_does_not_block_on_a_peer_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        port = SocketPort(theirs)
        for _ in range(200):
            port.send([Emission(list(range(1000)), list(range(1000)))])
        reader = FrameReader(is_engine=False)
        got: list[object] = []
        while len(got) < 200:
            got += reader.feed(ours.recv(1 << 20))
            assert port.receive(0.0) == []
            port.send([])
        assert all(value == Emission(list(range(1000)), list(range(1000)), []) for value in got)


def test_a_port_that_waits_for_ever_can_be_woken_from_another_thread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        port = SocketPort(theirs)
        waker = threading.Timer(0.01, port.wake)
        waker.start()
        assert port.receive(None) == []
        waker.join()
        port.wake()  # before it waits: it does not wait
        assert port.receive(None) == []
        assert port.receive(0.0) == []
