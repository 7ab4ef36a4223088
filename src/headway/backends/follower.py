"""Main of a process that computes a part of a model beside the engine's: it runs plans until its socket closes."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from headway import logs
from headway.backends.parallel import load_part
from headway.errors import ConfigError, EngineDead
from headway.models.shard import Shard
from headway.runner.gather import ShardLost
from headway.runner.lockstep import BeginShard, ShardLink, ShardReady, follow


def main(argv: Sequence[str] | None = None) -> int:
    """Follow the process at the other end of the descriptor."""
    parser = argparse.ArgumentParser(prog="headway-follower", description="A process of headway's tensor_parallel.")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.set_up("follower", "warning", "text")
    link = ShardLink(socket.socket(fileno=args.fd))
    try:
        begin = link.receive()
        assert isinstance(begin, BeginShard), begin
        try:
            loaded, meet = load_part(begin.config, Shard(begin.rank, begin.size), Path(begin.meeting))
        except Exception as error:
            link.send(link.encode(ShardReady(str(error), is_config=isinstance(error, ConfigError))))
            return 1
        link.send(link.encode(ShardReady()))
        meet()
        follow(link, lambda made: loaded.make_sized(made.config, made.max_len, made.num_blocks, made.host_blocks))
    except (EngineDead, ShardLost):
        return 0
    return 1


if __name__ == "__main__":
    os._exit(main())  # whatever threads gloo has
