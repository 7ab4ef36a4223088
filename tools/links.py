"""How fast KV crosses a link, as a share of what the machine does with nothing around it, in turns within one run.

    python tools/links.py [--rounds 21] [--mb 256] [--block-bytes 368640] [--nixl]

Two processes, as two engines are. tcp: against sendall and recv_into of the same bytes over the same kind of socket.
Shared memory: against one process copying the same blocks into memory that both have and another copying them out, with
no socket between the two. With --nixl that link takes the place of tcp. The link checks every byte (xxh3-128) at both
ends, the bare loops do not.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from headway.cluster.dialing import dial
from headway.cluster.fetch import Fetch, pack_fetch
from headway.cluster.fetch_config import FetchConfig
from headway.cluster.fetch_server import FetchServer
from headway.cluster.links import receive_exactly
from headway.engine.mover import Hold
from headway.engine.tier.record import is_whole

IDENTITY = bytes(32)
_SLOTS = 32


class Pool:
    """Blocks to serve: as many as there are, in memory that fits no cache."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self._memory = memoryview(bytearray(os.urandom(1 << 20) * (count * block_bytes // (1 << 20) + 1)))
        self._bytes = block_bytes

    def ask(self, keys: Sequence[bytes], lease_s: float, timeout_s: float) -> Hold | None:
        return Hold(1, range(len(keys)), 0.0)

    def copy_out(self, hold: Hold, index: int, into: memoryview) -> bool:
        into[:] = self._memory[index * self._bytes : (index + 1) * self._bytes]
        return True

    def done(self, hold: Hold) -> None:
        pass


def copy_for_ever(memory: BareMemory, count: int, block_bytes: int) -> None:
    """The writing process of the bare loop."""
    memory.copy_in(Pool(count, block_bytes), count)


def serve(count: int, block_bytes: int, pipe: Connection, listen: str) -> None:
    """The serving process: both links, a bare socket, and memory to copy through."""
    pool = Pool(count, block_bytes)
    server = FetchServer(pool, IDENTITY, block_bytes, FetchConfig(listen))
    bare = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_bare, args=(bare, pool, count, block_bytes), daemon=True).start()
    pipe.send((server.address.split(","), bare.getsockname()))
    pipe.recv()


def _send_bare(listener: socket.socket, pool: Pool, count: int, block_bytes: int) -> None:
    buffer, hold = memoryview(bytearray(block_bytes)), Hold(1, range(count), 0.0)
    while True:
        sock, _ = listener.accept()
        with sock:
            while sock.recv(1):
                for at in range(count):
                    pool.copy_out(hold, at, buffer)
                    sock.sendall(buffer)


def by_link(address: str, count: int, block_bytes: int) -> Callable[[], None]:
    link = dial(address, FetchConfig(), block_bytes)
    link.limit(600.0)
    request = pack_fetch(Fetch(IDENTITY, [at.to_bytes(32, "little") for at in range(count)], 60.0))
    buffers = [memoryview(bytearray(block_bytes)) for _ in range(64)]

    def fetch() -> None:
        link.ask(request)
        for at in range(count):
            data = buffers[at % len(buffers)]
            header = link.receive(data)
            assert header is not None
            assert is_whole(header, data)
        assert link.receive(buffers[0]) is None

    return fetch


def by_bare_socket(address: tuple[str, int], count: int, block_bytes: int) -> Callable[[], None]:
    sock = socket.create_connection(address)
    buffers = [memoryview(bytearray(block_bytes)) for _ in range(64)]

    def fetch() -> None:
        sock.sendall(b"g")
        for at in range(count):
            receive_exactly(sock, buffers[at % len(buffers)])

    return fetch


class BareMemory:
    """Blocks copied in by one process and out by another, which agree by two numbers in the same memory."""

    def __init__(self, block_bytes: int) -> None:
        self._bytes = block_bytes
        memory = memoryview(mmap.mmap(-1, 4096 + _SLOTS * block_bytes))
        self._numbers = memory[:16].cast("Q")  # blocks that were written, and taken, since the start
        self._arena = memory[4096:]
        self._go = multiprocessing.get_context("fork").Semaphore(0)  # the writer sleeps until a round begins

    def copy_in(self, pool: Pool, count: int) -> None:
        """The writer, for ever."""
        numbers, hold, at = self._numbers, Hold(1, range(count), 0.0), 0
        while self._go.acquire():
            for _ in range(count):
                while at >= numbers[1] + _SLOTS:
                    time.sleep(0)
                pool.copy_out(hold, at % count, self._slot(at))
                at += 1
                numbers[0] = at

    def copy_out(self, count: int) -> Callable[[], None]:
        """The reader."""
        buffers = [memoryview(bytearray(self._bytes)) for _ in range(64)]

        def fetch() -> None:
            numbers = self._numbers
            self._go.release()
            for at in range(count):
                while numbers[0] <= numbers[1]:
                    time.sleep(0)
                buffers[at % len(buffers)][:] = self._slot(numbers[1])
                numbers[1] += 1

        return fetch

    def _slot(self, at: int) -> memoryview:
        return self._arena[at % _SLOTS * self._bytes :][: self._bytes]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--nixl", action="store_true", help="NIXL in place of tcp")
    args = parser.parse_args(argv)
    count = max(1, args.mb * 10**6 // args.block_bytes)
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=serve, args=(count, args.block_bytes, theirs, f"{'nixl:' * args.nixl}127.0.0.1:0"))
    process.start()
    (unix, tcp), bare = ours.recv()
    memory = BareMemory(args.block_bytes)
    writer = fork.Process(target=copy_for_ever, args=(memory, count, args.block_bytes), daemon=True)
    writer.start()
    size = count * args.block_bytes / 1e9
    other = (by_link(tcp, count, args.block_bytes), by_bare_socket(bare, count, args.block_bytes))
    pairs = {
        "shared memory": (by_link(unix, count, args.block_bytes), memory.copy_out(count)),
        "nixl" if args.nixl else "tcp": other,
    }
    is_good = True
    for name, (link, loop) in pairs.items():
        rates: tuple[list[float], list[float]] = ([], [])
        for turn in range(args.rounds + 1):
            for which, run in enumerate((link, loop)):
                began = time.perf_counter()
                run()
                if turn:  # the first round touches memory
                    rates[which].append(size / (time.perf_counter() - began))
        medians = [statistics.median(each) for each in rates]
        share = statistics.median(a / b for a, b in zip(*rates, strict=True))
        is_good = is_good and share >= 0.8
        print(f"{name}: {medians[0]:.2f} GB/s, bare loop {medians[1]:.2f} GB/s, median ratio {share:.2f}")
    writer.kill()
    ours.send(None)
    process.join(5)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
