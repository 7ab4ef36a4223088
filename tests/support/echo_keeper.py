"""A keeper of an engine around `EchoEngine`, also as a process of its own that tests kill."""

from __future__ import annotations

import sys
import time

import echo_join
from headway.cluster.join import JoinConfig
from headway.cluster.keeper import EngineKeeper
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import EngineConfig


def keep(port: int, model: str = "slow", *, max_len: int = 2_000_000, with_thread: bool = True, **more: object):  # type: ignore[no-untyped-def]
    """A keeper whose engine joins the front at this port of this machine."""
    config = EngineConfig.of(model=model, max_model_len=max_len)
    join = JoinConfig(join=f"127.0.0.1:{port}", name="kept")

    def start(pulse_fd: int, is_another: bool) -> JoiningProcess:
        return start_joining(
            config,
            join,
            command=echo_join.JOINING,
            is_another=is_another,
            pulse_fd=pulse_fd,
            dies_with_thread=with_thread,
        )

    return EngineKeeper(start, **more)  # type: ignore[arg-type]


if __name__ == "__main__":
    kept = keep(int(sys.argv[1]), with_thread=sys.argv[2] == "thread")
    kept.wait_ready()
    print(kept.pid, flush=True)
    time.sleep(600)
