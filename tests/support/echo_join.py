"""An engine process around `EchoEngine` that joins fronts, and a way to start several of them in tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import echo_child
from headway.cli.engine_child import end
from headway.cli.join_child import main
from headway.cluster.join import JoinConfig
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import EngineConfig

JOINING = (str(Path(__file__)),)


def start_echo(  # type: ignore[no-untyped-def]
    port: int,
    name: str = "",
    model: str = "slow",
    *,
    max_len: int = 2_000_000,
    num_blocks: int = 200_000,
    **more: object,
):
    """A process that joins the front at this port of this machine."""
    config = EngineConfig.of(model=model, max_model_len=max_len, num_blocks=num_blocks)
    join = JoinConfig(join=str(more.pop("join", f"127.0.0.1:{port}")), name=name, **more)  # type: ignore[arg-type]
    return start_joining(config, join, command=JOINING)


@contextmanager
def killed(processes: list[JoiningProcess]) -> Iterator[list[JoiningProcess]]:
    """None of them is left afterwards."""
    try:
        yield processes
    finally:
        for each in processes:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()
            each.sock.close()


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    end(main(build=echo_child.build))
