"""Main of the engine process: descriptor and log level come as arguments, the configuration over the descriptor.

It builds the engine and hands it to `engine.child`; it decides nothing. Signals that end the server reach the
server's own process, which then ends this one; should that process die, its end of the socket closes and this
one exits at once, even in the middle of a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from headway import logs
from headway.cluster.fetch_config import THIS_MACHINE, FetchConfig, ReplicaFetching
from headway.config import EngineConfig
from headway.engine.child import ServedEngine, serve
from headway.engine.messages import PeerGone
from headway.engine.pulse import Pulse, leave_stacks
from headway.engine.wire import SocketPort


def main(argv: Sequence[str] | None = None, build: Callable[[EngineConfig], ServedEngine] | None = None) -> int:
    """Run one engine until the API process is done with it; `build` makes it, headway's own unless given."""
    parser = argparse.ArgumentParser(prog="headway-engine", description="The engine process of headway serve.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pulse-fd", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--another", action="store_true")
    parser.add_argument("--told-fd", type=int, help="how KV is fetched from and by other engines of the same server")
    args = parser.parse_args(argv)
    # The API process drains first and then ends this one; a signal to the whole group must not cut that short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.set_up("engine", args.log_level, args.log_format)
    fetching = THIS_MACHINE
    if args.told_fd is not None:
        with os.fdopen(args.told_fd, "rb") as told:
            fetching = ReplicaFetching.unpack(told.read())
    sock = socket.socket(fileno=args.fd)
    threading.Thread(target=exit_with_peer, args=(sock.fileno(),), name="headway-peer", daemon=True).start()
    port = SocketPort(sock)
    pulse = None
    if args.pulse_fd is not None:
        leave_stacks(args.pulse_fd)
        pulse = Pulse(args.pulse_fd)
    kept: list[object] = []  # until this process ends

    def make() -> ServedEngine:
        config = port.configuration()
        return build_own(config, kept, args.another, fetching) if build is None else build(config)

    try:
        code = serve(port, make, owns_process=True, pulse=pulse)
        port.drain()
    except PeerGone:
        return 0
    return code


def build_own(
    config: EngineConfig, kept: list[object], is_another: bool, fetching: FetchConfig = THIS_MACHINE
) -> ServedEngine:
    """Headway's own engine; `kept` is to live as long as it does."""
    # Imports the engine, which takes a while: the descriptor is watched before, and tests do without.
    from headway.build import build_engine, load

    loaded = load(config)
    kept.append(loaded.source)  # which marks the conversion as in use
    return build_engine(config, loaded, appends_log=is_another, fetching=fetching)


def exit_with_peer(fd: int) -> None:
    """Wait for the other end to close, then exit at once: no state here needs saving."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)


def end(code: int) -> NoReturn:
    """End this process, whatever threads and libraries are in it: one that has failed may never get to its exit."""
    if code:
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    end(main())
