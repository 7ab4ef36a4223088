"""What reaches the port where KV is fetched and should not: it costs little, ends soon, and no engine notices."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import moving
from headway.cluster import dialing, fetch_peers, fetch_server, handshake
from headway.cluster.dialing import dial
from headway.cluster.fetch import Fetch, pack_fetch
from headway.cluster.fetch_config import FetchConfig
from headway.cluster.fetch_peers import FetchPeers
from headway.cluster.fetch_server import FetchServer
from headway.cluster.fronts import FrontsPort
from headway.cluster.handshake import ANSWER_BYTES, HELLO_BYTES, KV, Hello, admitting, certified, proof, trusting
from headway.cluster.join import JoinConfig
from headway.cluster.links import LinkBroken, TcpLink
from headway.engine.child import Wakeable
from headway.engine.messages import VERSION
from headway.engine.mover import LOAD_LEASE_S
from headway.errors import ConfigError
from moving import BLOCK_BYTES, Moving

IDENTITY, KEY = bytes(range(32)), b"the fleet's key, of 16 bytes or more"
FLEET = FetchConfig("127.0.0.1:0", key=KEY)
PROMPT = [(7 * i) % 50 for i in range(40)]
TLS = Path(moving.__file__).parent / "tls"


class Kept:
    """An engine that keeps the KV of a prompt, steps on a thread, and serves peers over TCP."""

    def __init__(self, config: FetchConfig = FLEET, hold_s: float = 60.0) -> None:
        self.engine = Moving()
        self.engine.add(1, PROMPT, 1, hold_s=hold_s)
        self.engine.run(1)
        self.server = FetchServer(self.engine.mover, IDENTITY, BLOCK_BYTES, config)
        self.address = self.server.address.split(",")[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        while not self._stop.wait(0.0005):
            if self.engine.engine.has_work:
                self.engine.step()

    def connect(self) -> socket.socket:
        host, port = dialing.host_port(self.address.partition(":")[2])
        return socket.create_connection((host, port), 30)

    def require_serves(self, config: FetchConfig = FLEET) -> None:
        """A peer with the key still gets all there is, and the same tokens."""
        two = Moving(peers=(peers := FetchPeers(IDENTITY, BLOCK_BYTES, config)))
        first = self.engine.answers[1]
        more = {"num_prompt": len(PROMPT), "is_resumed": True, "fetch_from": self.address}
        two.add(1, [*PROMPT, *first], 5, **more)
        two.run(1)
        peers.close()
        two.answers[1] = [*first, *two.answers[1]]
        assert two.is_right(1, PROMPT, 5)
        assert two.engine.stats().tokens_from_peers == len(PROMPT)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.server.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.close()


def until(is_so: object, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.002)


def said_until_closed(sock: socket.socket) -> bytes:
    got = bytearray()
    with suppress(ConnectionError):  # one that is not closed in time fails the test
        while more := sock.recv(4096):
            got += more
    return bytes(got)


def receive(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (more := sock.recv(count - len(got))):
        got += more
    return got


@pytest.mark.parametrize("key", [b"another key of sixteen bytes", None])
def test_a_wrong_key_is_refused_and_said(kept: Kept, key: bytes | None) -> None:
    with pytest.raises(LinkBroken, match="key"):
        dial(kept.address, FetchConfig(key=key), BLOCK_BYTES)
    kept.require_serves()


def test_a_listener_that_cannot_prove_the_key_is_left(kept: Kept) -> None:
    other = Kept(FetchConfig("127.0.0.1:0", key=b"another key of sixteen bytes"))
    try:
        with pytest.raises(LinkBroken, match="key"):
            dial(other.address, FLEET, BLOCK_BYTES)
    finally:
        other.close()


def answer(hello: bytes, party: str = KV.dialer) -> bytes:
    """A good answer to what the listener said."""
    nonce = os.urandom(32)
    return Hello(VERSION, True, nonce).encode() + proof(KEY, party.encode(), Hello.decode(hello).nonce, nonce)


def test_a_recorded_handshake_proves_nothing_in_another_connection(kept: Kept) -> None:
    with kept.connect() as sock:
        recorded = answer(receive(sock, HELLO_BYTES))
        sock.sendall(recorded)
        assert receive(sock, 1) == b"\0", "it is good in its own connection"
    with kept.connect() as sock:
        receive(sock, HELLO_BYTES)
        sock.sendall(recorded)
        assert said_until_closed(sock)[0] == 1
    kept.require_serves()


@pytest.mark.parametrize("party", ["engine", "front", KV.listener])
def test_a_proof_for_another_port_or_the_other_party_is_none(kept: Kept, party: str) -> None:
    with kept.connect() as sock:
        sock.sendall(answer(receive(sock, HELLO_BYTES), party))
        assert said_until_closed(sock)[0] == 1
    kept.require_serves()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, os.urandom(4096), b"\xff" * 200, b""])
def test_garbage_instead_of_a_handshake_is_dropped(kept: Kept, garbage: bytes) -> None:
    with kept.connect() as sock:
        sock.sendall(garbage)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        said_until_closed(sock)
    kept.require_serves()


def test_peers_that_say_nothing_or_little_are_few_and_have_little_time(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "HANDSHAKE_S", 0.5)
    socks = [kept.connect() for _ in range(40)]
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.05):  # each by itself within any timeout
            for sock in socks:
                with suppress(OSError):
                    sock.send(b"h")

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    try:
        until(lambda: kept.server._unknown.total() == handshake.MOST_UNKNOWN_PER_IP)
        until(lambda: not kept.server._unknown and not kept.server._open)
    finally:
        stop.set()
        dribbling.join()
    for sock in socks:
        said_until_closed(sock)
        sock.close()
    kept.require_serves()


def enter(kept: Kept) -> TcpLink:
    link = dial(kept.address, FLEET, BLOCK_BYTES)
    assert isinstance(link, TcpLink)
    link.limit(30.0)
    return link


def test_a_request_that_dribbles_in_is_not_waited_for(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_server, "_REQUEST_S", 0.3)
    link = enter(kept)
    raw = pack_fetch(Fetch(IDENTITY, [bytes(32)] * 50, 5.0))
    num_sent = 0
    with suppress(OSError):
        while num_sent < len(raw):
            num_sent += link.sock.send(raw[num_sent : num_sent + 1])
            time.sleep(0.02)
    assert num_sent < len(raw)
    link.close()
    until(lambda: not kept.server._open)
    kept.require_serves()


def test_a_peer_that_asks_for_nothing_is_hung_up_on(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_server, "_IDLE_S", 0.2)
    link = enter(kept)
    assert said_until_closed(link.sock) == b""
    link.close()
    kept.require_serves()


def test_a_peer_that_reads_little_by_little_keeps_no_block_beyond_its_lease(kept: Kept) -> None:
    big = 64 << 20  # more than the sockets hold, and than is read in the time of the lease
    kept.server._block_bytes = big
    kept.engine.executor.read_block = lambda block, into: None  # type: ignore[method-assign]
    link = dial(kept.address, FLEET, big)
    assert isinstance(link, TcpLink)
    link.limit(30.0)
    keys = list(kept.engine.ledger.index.key_of.values())
    kept.engine.engine.abort(1)
    link.ask(pack_fetch(Fetch(IDENTITY, keys, 0.3)))
    num_bytes = 0
    while more := len(read_some(link.sock)):
        num_bytes += more
        time.sleep(0.005)
    assert 0 < num_bytes < big
    until(lambda: kept.server._num_peers == 0 and kept.engine.num_free == 64)
    link.close()


def read_some(sock: socket.socket) -> bytes:
    try:
        return sock.recv(20_000)
    except OSError:
        return b""


def test_only_so_many_peers_are_served_at_a_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_server, "MOST_PEERS", 3)
    links = []
    for number in range(1, 4):
        links.append(enter(kept))
        until(lambda number=number: kept.server._num_peers == number)  # type: ignore[misc]
    late = enter(kept)
    assert said_until_closed(late.sock) == b""
    for link in [*links, late]:
        link.close()
    until(lambda: kept.server._num_peers == 0)
    kept.require_serves()


def test_garbage_from_a_peer_with_the_key_costs_its_connection_alone(kept: Kept) -> None:
    for junk in (b"\xff" * 4096, pack_fetch(Fetch(IDENTITY, [bytes(32)], 1.0))[:-1] + b"x", b"HWF1" + b"\xff" * 40):
        link = enter(kept)
        link.sock.sendall(junk)
        said_until_closed(link.sock)
        link.close()
    kept.require_serves()


def test_tls_is_checked_by_the_engine_that_fetches() -> None:
    served = FetchConfig("127.0.0.1:0", key=KEY, server_tls=certified(str(TLS / "cert.pem"), str(TLS / "key.pem"), ""))
    kept = Kept(served)
    try:
        assert kept.address.startswith("tls:")
        with pytest.raises(LinkBroken, match="--tls-ca"):
            dial(kept.address, FLEET, BLOCK_BYTES)
        with pytest.raises(LinkBroken, match="certificate"):
            dial(kept.address, FetchConfig(key=KEY, client_tls=ssl.create_default_context()), BLOCK_BYTES)
        with kept.connect() as sock:  # in clear
            sock.sendall(b"headway" + bytes(ANSWER_BYTES))
            said_until_closed(sock)
        kept.require_serves(FetchConfig(key=KEY, client_tls=trusting(str(TLS / "cert.pem"))))
    finally:
        kept.close()


def test_without_a_key_only_this_machine_can_be_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="no key"):
            JoinConfig(join="127.0.0.1:7500", kv_listen=f"{host}:7600")
    with pytest.raises(ConfigError, match="kv_listen"):
        JoinConfig(join="127.0.0.1:7500", kv_listen="7600")
    with pytest.raises(ConfigError, match="kv-tls-cert"):
        JoinConfig(join="127.0.0.1:7500", kv_tls_key=str(TLS / "key.pem"))
    server = FetchServer(Moving().mover, IDENTITY, BLOCK_BYTES, FetchConfig("0.0.0.0:0", "127.0.0.1", KEY))
    server.close()
    assert "without TLS" in caplog.text


def test_by_default_kv_is_had_where_the_front_is_reached() -> None:
    joins = JoinConfig(join="127.0.0.1:7500")
    assert joins.fetching("prefill").listen == joins.fetching("decode").listen == "127.0.0.1:0"
    assert joins.fetching("both").listen == ""
    given = JoinConfig(join="127.0.0.1:7500", kv_listen="0.0.0.0:0", key=KEY.decode()).fetching("both")
    assert given.shown(7) == "tcp:127.0.0.1:7"


def test_a_peer_that_falls_silent_is_given_up_once_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_peers, "_QUIET_S", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        dialing._talk(sock, admitting(KEY, KV), time.monotonic() + 30)
        said_until_closed(sock)
        sock.close()

    serving = threading.Thread(target=serve)
    serving.start()
    began = time.monotonic()
    two = Moving(peers=(peers := FetchPeers(IDENTITY, BLOCK_BYTES, FLEET)))
    prompts = {id: [id, *PROMPT[:20]] for id in range(1, 6)}
    for id, prompt in prompts.items():
        two.add(id, prompt, 5, is_resumed=True, fetch_from=f"tcp:127.0.0.1:{listener.getsockname()[1]}")
    two.run(*prompts)
    assert time.monotonic() - began < LOAD_LEASE_S
    assert all(two.is_right(id, prompt, 5) for id, prompt in prompts.items())
    peers.close()
    serving.join()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_an_engine_that_waits_for_fronts_is_woken_by_blocks_that_arrive() -> None:
    port = FrontsPort("x", "i", 1, lambda: None)
    assert isinstance(port, Wakeable)
    waiting = threading.Thread(target=port.receive, args=(None,), daemon=True)
    waiting.start()
    port.wake()
    waiting.join(30)
    assert not waiting.is_alive()
