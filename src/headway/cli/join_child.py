"""Main of an engine process that joins fronts: what it is to do comes over a socket, and it ends with that socket."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from headway import logs
from headway.cli.engine_child import build_own, end, exit_with_peer
from headway.cluster.join import die_with_parent, run_joined
from headway.cluster.spawn import READY, receive_orders
from headway.config import EngineConfig
from headway.engine.child import ServedEngine


def main(argv: Sequence[str] | None = None, build: Callable[[EngineConfig], ServedEngine] | None = None) -> int:
    """Run one engine until its fronts, its parent or a signal end it; `build` makes it, headway's own unless given."""
    parser = argparse.ArgumentParser(prog="headway-engine", description="The engine process of headway engine.")
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--die-with-parent", action="store_true", help="also end when the starting thread does")
    parser.add_argument("--pulse-fd", type=int, help="where to show what the engine does")
    args = parser.parse_args(argv)
    if args.die_with_parent:
        die_with_parent()
    sock = socket.socket(fileno=args.parent_fd)
    orders = receive_orders(sock)
    threading.Thread(target=exit_with_peer, args=(sock.fileno(),), name="headway-parent", daemon=True).start()
    logs.set_up("engine", orders.log_level, orders.log_format)
    kept: list[object] = []  # until this process ends

    def make() -> ServedEngine:
        if build is not None:
            return build(orders.engine)
        fetching = orders.join.fetching(orders.engine.scheduler.role)
        return build_own(orders.engine, kept, orders.is_another, fetching)

    def ready() -> None:
        with suppress(OSError):
            sock.sendall(READY)

    has_device = orders.engine.model.device != "cpu"
    return run_joined(orders.join, make, has_device=has_device, on_ready=ready, pulse_fd=args.pulse_fd)


if __name__ == "__main__":
    end(main())
