"""Blocks between two engines, over both links: the same tokens, and every fault is a cache miss."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import moving
from headway.cluster import dialing, fetch_config, handshake, nixl_link
from headway.cluster.dialing import _talk, dial
from headway.cluster.fetch import END, Fetch, pack_fetch, unpack_fetch
from headway.cluster.fetch_config import FetchConfig
from headway.cluster.fetch_peers import FetchPeers
from headway.cluster.fetch_server import FetchServer
from headway.cluster.handshake import admitting, certified, trusting
from headway.cluster.links import LinkBroken, send_all
from headway.engine.mover import wanted_keys
from headway.engine.tier.record import HEADER_BYTES, checksum, pack_header
from headway.errors import ConfigError
from headway.values.states import State
from moving import BLOCK, BLOCK_BYTES, Moving

IDENTITY, KEY = bytes(range(32)), b"the fleet's key, of 16 bytes or more"
PROMPT = [(11 * i) % 50 for i in range(42)]
LINKS = ["unix", "tcp", "tls"] + ["nixl"] * (find_spec("nixl") is not None)  # which is no dependency
TLS = Path(moving.__file__).parent / "tls"
FLEET = FetchConfig(key=KEY)


def reached_by(kind: str, key: bytes = KEY) -> FetchConfig:
    """An engine of this machine that listens so."""
    if kind == "unix":
        return FetchConfig(key=key)
    tls = certified(str(TLS / "cert.pem"), str(TLS / "key.pem"), "") if kind == "tls" else None
    return FetchConfig("nixl:127.0.0.1:0" if kind == "nixl" else "127.0.0.1:0", key=key, server_tls=tls)


class Pair:
    """An engine that has computed a prompt and keeps it, and one that goes on with it."""

    def __init__(self, kind: str = "unix", prompt: list[int] = PROMPT, hold_s: float = 60.0, **more: bytes) -> None:
        self.prompt = prompt
        self.one = Moving()
        config = reached_by(kind, more.get("server_key", KEY))
        self.server = FetchServer(self.one.mover, more.get("served", IDENTITY), BLOCK_BYTES, config)
        self.address = self.server.address.split(",")[-1]  # else it would always be shared memory
        if prompt:
            self.one.add(1, prompt, 1, hold_s=hold_s)
            self.one.run(1)
        trusts = trusting(str(TLS / "cert.pem"))
        self.peers = FetchPeers(IDENTITY, BLOCK_BYTES, FetchConfig(key=KEY, client_tls=trusts))
        self.two = Moving(peers=self.peers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)

    def _drive(self) -> None:
        """Step the serving engine, as its process does."""
        while not self._stop.is_set():
            if self.one.engine.has_work:
                self.one.step()
            time.sleep(0.0005)

    def hand_over(self, max_tokens: int = 5, at: str | None = None) -> None:
        """The second engine goes on behind the first token."""
        self._thread.start()
        tokens = [*self.prompt, *self.one.answers[1]]
        at = self.address if at is None else at
        self.two.add(1, tokens, max_tokens, num_prompt=len(self.prompt), is_resumed=True, fetch_from=at)
        self.two.run(1)
        self.two.answers[1] = [*self.one.answers[1], *self.two.answers[1]]

    @property
    def is_right(self) -> bool:
        return self.two.is_right(1, self.prompt, 5)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.server.close()
        self.peers.close()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("at", LINKS)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 40, 42])
def test_a_request_goes_on_with_the_kv_of_another_engine(pairs: list[Pair], at: str, num_prompt: int) -> None:
    pair = Pair(at, PROMPT[:num_prompt])
    pairs.append(pair)
    pair.hand_over()
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == num_prompt
    assert pair.two.executor.computed_tokens == 4, "no token of the prompt is computed again"
    assert pair.two.num_free == 64
    pair.one.engine.abort(1)
    assert pair.one.num_free == 64


@pytest.mark.parametrize("at", LINKS)
def test_one_connection_serves_any_number_of_fetches(pairs: list[Pair], at: str) -> None:
    pair = Pair(at, [])
    pairs.append(pair)
    rng, num_prompts = random.Random(2), 40
    prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, 70))] for _ in range(num_prompts)]
    for id, prompt in enumerate(prompts, 2):
        pair.one.add(id, prompt, 1, hold_s=60.0)
        pair.one.run(id)
        tokens = [*prompt, *pair.one.answers[id]]
        more = {"num_prompt": len(prompt), "is_resumed": True, "fetch_from": pair.address}
        pair.two.add(id, tokens, 3, **more)
        pair.two.run(id)
        assert pair.two.executor.computed_tokens == 2 * (id - 1), "no token of a prompt is computed again"
        pair.one.engine.abort(id)
    assert pair.two.engine.stats().tokens_from_peers == sum(map(len, prompts))
    assert pair.two.engine.stats().failed_loads == 0


@pytest.mark.parametrize("at", LINKS)
def test_memory_of_blocks_is_used_again_but_for_what_is_still_looked_at(pairs: list[Pair], at: str) -> None:
    pair = Pair(at)
    pairs.append(pair)
    pair._thread.start()
    peers, keys = pair.peers, wanted_keys(pair.one.scheduler.state.live[1], BLOCK)

    def load(ticket: int) -> None:
        peers.load(ticket, keys, pair.address)
        began = time.monotonic()
        while not peers.has_arrivals or peers._arrivals[-1][::2] != (ticket, None):
            assert time.monotonic() - began < 10
            time.sleep(0.0005)

    load(1)
    first = [each.data for each in peers.take(len(keys) + 1)[:-1]]
    contents, memory = [bytes(each) for each in first if each], {id(each.obj) for each in first}  # type: ignore[union-attr]
    assert len(set(contents)) == len(keys)
    load(2)
    assert [bytes(each) for each in first if each] == contents, "it is good until the next `take`"
    second = [peers.take(1)[0] for _ in keys]
    assert [bytes(second[-1].data or b""), second[-1].place] == [contents[-1], len(keys) - 1]
    load(3)  # the last block of the second load is still looked at, the others of both are free
    assert bytes(second[-1].data or b"") == contents[-1]
    third = [each.data for each in peers.take(len(keys) + 2) if each.data is not None]
    assert [bytes(each) for each in third] == contents
    assert {id(each.obj) for each in third} & memory, "new memory, though there is some"  # type: ignore[union-attr]


@pytest.mark.parametrize("at", LINKS)
def test_what_the_second_engine_has_is_not_fetched(pairs: list[Pair], at: str) -> None:
    pair = Pair(at)
    pairs.append(pair)
    pair.two.add(7, PROMPT[:21], 1)
    pair.two.run(7)
    pair.hand_over()
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == 42 - 20


@pytest.mark.parametrize("at", LINKS)
def test_blocks_that_no_request_holds_are_fetched_from_the_cache(pairs: list[Pair], at: str) -> None:
    pair = Pair(at)
    pairs.append(pair)
    pair.one.engine.abort(1)  # its lease is over: what it had is cached, but for the block that is not full
    pair.hand_over()
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == 40
    pair._stop.set()
    pair._thread.join()
    pair.one.step()
    assert pair.one.num_free == 64


@pytest.mark.parametrize("at", LINKS)
@pytest.mark.parametrize(
    "fault", [{"server_key": b"another key, just as long"}, {"served": bytes(32)}, {"at": "unix:/nowhere"}, {"at": "x"}]
)
def test_a_peer_that_is_another_or_none_is_a_miss(pairs: list[Pair], at: str, fault: dict[str, object]) -> None:
    pair = Pair(at, **{name: value for name, value in fault.items() if name != "at"})  # type: ignore[arg-type]
    pairs.append(pair)
    pair.hand_over(at=fault.get("at"))  # type: ignore[arg-type]
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == 0
    assert pair.two.num_free == 64


@pytest.mark.parametrize("at", ["serving", "dialling"])
def test_a_process_of_another_user_is_a_miss(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Either end looks who the other one is, since a name of the machine can be dialled by all, and taken by all."""
    pair = Pair("unix")
    pairs.append(pair)
    has_looked, require_own = threading.Event(), dialing._require_own

    def look(sock: socket.socket) -> None:
        if bool(sock.getsockname()) != (at == "serving"):  # the end that dialled has no name
            return require_own(sock)
        has_looked.set()
        raw = dialing._PEER.pack(os.getpid(), os.geteuid() + 1, os.getegid())
        return require_own(SimpleNamespace(getsockopt=lambda *_: raw))  # type: ignore[arg-type]

    monkeypatch.setattr(dialing, "_require_own", look)
    pair.hand_over()
    assert has_looked.is_set()
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == 0


def test_a_server_that_ends_in_the_middle_is_a_miss(pairs: list[Pair]) -> None:
    pair = Pair()
    pairs.append(pair)
    pair.server.close()
    pair.hand_over()
    assert pair.is_right


def test_of_two_requests_with_the_same_tokens_each_keeps_its_own() -> None:
    one = Moving()
    for id in (1, 2):
        one.add(id, PROMPT, 1, hold_s=60.0)
        one.run(id)
    tokens = [*PROMPT, *one.answers[1]]
    one.add(9, tokens, 1)
    keys = wanted_keys(one.scheduler.state.live[9], BLOCK)
    one.engine.abort(9)
    later = one.mover.ask(keys, 5.0, 5.0)
    assert later is not None
    one.engine.abort(2)
    assert not later.stands, "the blocks that are not shared are free"
    one.engine.abort(1)
    assert one.num_free == 64
    assert not one.mover._kept_by


class Liar:
    """A server that sends whatever it is told, once."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._answers = answers
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, self._listener:
            _talk(sock, admitting(KEY, handshake.KV), time.monotonic() + 5)
            sock.recv(1 << 20)
            sock.sendall(b"".join(self._answers))


def records(pair: Pair) -> list[bytes]:
    """What an honest server would send for the prompt."""
    pair.two.add(99, [*pair.prompt, *pair.one.answers[1]], 1)
    keys = wanted_keys(pair.two.scheduler.state.live[99], BLOCK)
    pair.two.engine.abort(99)
    hold = pair.one.mover.ask(keys, 5.0, 5.0)
    assert hold is not None
    made = []
    for at, key in enumerate(keys):
        data = memoryview(bytearray(BLOCK_BYTES))
        assert pair.one.mover.copy_out(hold, at, data)
        made.append(pack_header(key, BLOCK_BYTES, checksum(data)) + bytes(data))
    return made


def test_any_flipped_bit_in_an_answer_is_noticed(pairs: list[Pair]) -> None:
    rng = random.Random(3)
    pair = Pair()
    pairs.append(pair)
    sent = records(pair)
    for attempt in range(60):
        number, bit = rng.randrange(len(sent)), rng.randrange(8 * (HEADER_BYTES + BLOCK_BYTES))
        if attempt < 2:
            number, bit = 0, attempt * 8 * HEADER_BYTES  # once in a header, once in the data
        broken = bytearray(sent[number])
        broken[bit // 8] ^= 1 << bit % 8
        liar = Liar(*sent[:number], bytes(broken), *sent[number + 1 :], END)
        two = Moving(peers=(peers := FetchPeers(IDENTITY, BLOCK_BYTES, FLEET)))
        tokens = [*PROMPT, *pair.one.answers[1]]
        two.add(1, tokens, 5, num_prompt=len(PROMPT), is_resumed=True, fetch_from=liar.address)
        two.run(1)
        peers.close()
        two.answers[1] = [*pair.one.answers[1], *two.answers[1]]
        assert two.is_right(1, PROMPT, 5)
        assert two.engine.stats().tokens_from_peers == number * BLOCK
        assert two.num_free == 64


@pytest.mark.parametrize("what", ["nothing", "garbage", "no end", "twice", "reversed", "foreign", "long"])
def test_answers_that_make_no_sense_cost_a_miss(pairs: list[Pair], what: str) -> None:
    pair = Pair()
    pairs.append(pair)
    sent = records(pair)
    foreign = pack_header(b"?" * 32, BLOCK_BYTES, checksum(bytes(BLOCK_BYTES))) + bytes(BLOCK_BYTES)
    answers, num_tokens = {
        "nothing": ([], 0),
        "garbage": ([b"\xff" * 5000], 0),
        "no end": (sent[:3], 12),
        "twice": ([*sent[:4], *sent[:4], END], 16),
        "reversed": ([*reversed(sent), END], 42),
        "foreign": ([*sent[:2], foreign, *sent[2:4], END], 16),
        "long": ([pack_header(b"?" * 32, 1 << 30, bytes(16))], 0),
    }[what]
    pair.hand_over(at=Liar(*answers).address)
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == num_tokens


def test_garbage_to_the_server_closes_that_connection_alone(pairs: list[Pair]) -> None:
    pair = Pair("tcp")
    pairs.append(pair)
    for junk in (b"\xff" * 4096, b"", pack_fetch(Fetch(IDENTITY, [bytes(32)], 1.0))[:-1] + b"x"):
        link = dial(pair.address, FLEET, BLOCK_BYTES)
        send_all(link.sock, junk)
        with suppress(OSError):  # it has hung up already
            link.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkBroken):
            link.receive(memoryview(bytearray(BLOCK_BYTES)))
        link.sock.close()
    pair.hand_over()
    assert pair.is_right
    assert pair.two.engine.stats().tokens_from_peers == 42


def test_a_request_says_what_was_packed_and_any_flipped_bit_is_noticed() -> None:
    fetch = Fetch(IDENTITY, [bytes([i]) * 32 for i in range(3)], 1.5)
    raw = pack_fetch(fetch)
    assert unpack_fetch(raw) == fetch
    for bit in range(8 * len(raw)):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        assert unpack_fetch(broken) is None
    for count in range(len(raw)):
        assert unpack_fetch(raw[:count]) is None


def test_without_a_key_other_machines_cannot_fetch() -> None:
    with pytest.raises(ConfigError, match="no key"):
        FetchConfig("0.0.0.0:0")


def test_nixl_that_is_not_installed_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl"):
        FetchConfig("nixl:127.0.0.1:0")


def test_nixl_does_not_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_config, "find_spec", lambda name: "found")
    tls = certified(str(TLS / "cert.pem"), str(TLS / "key.pem"), "")
    with pytest.raises(ConfigError, match="does not encrypt"):
        FetchConfig("nixl:127.0.0.1:0", server_tls=tls)


@pytest.mark.parametrize("has_nixl", [(True, False), (False, True), (False, False)])
def test_where_an_end_lacks_nixl_blocks_cross_by_tcp(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, has_nixl: tuple[bool, bool]
) -> None:
    """`has_nixl`: of the end that serves and of the one that dials; the one that has it must not need it to say so."""
    monkeypatch.setattr(fetch_config, "find_spec", lambda name: "found")
    made, make = list[object](), nixl_link.TcpLink

    def find() -> object | None:
        return object() if has_nixl[threading.current_thread().name == "headway-fetching"] else None

    def note(sock: socket.socket, block_bytes: int) -> object:
        made.append(make(sock, block_bytes))
        return made[-1]

    monkeypatch.setattr(nixl_link, "find_nixl", find)
    monkeypatch.setattr(nixl_link, "TcpLink", note)
    pair = Pair("nixl")
    pairs.append(pair)
    assert pair.address.startswith("nixl:")
    pair.hand_over()
    assert pair.is_right
    assert len(made) == 2
    assert pair.two.engine.stats().tokens_from_peers == 42


def test_kv_that_was_kept_is_given_back_when_the_lease_ends_though_nothing_was_fetched(pairs: list[Pair]) -> None:
    pair = Pair(hold_s=0.02)
    pairs.append(pair)
    assert pair.one.scheduler.state.live[1].state is State.HELD
    until = time.monotonic() + 5
    while pair.one.num_free < 64:
        pair.one.step()
        assert time.monotonic() < until
    pair.hand_over()
    assert pair.is_right
