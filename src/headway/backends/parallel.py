"""One model computed by several processes of this machine (`tensor_parallel`): the first is the engine's own.

Followers are started when the model is loaded, and end with the socket that ties them to the first process, whatever
ends it. How the model is spread is in `models.shard`, what passes between the processes in `runner.lockstep`.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from headway.backends._host import usable_cores
from headway.backends._seam import Backend, ComputeInfo
from headway.backends.cpu import LoadedCpu, load_shard
from headway.config import EngineConfig
from headway.engine.executor import Executor
from headway.errors import ConfigError, EngineDead
from headway.extras import require_torch
from headway.modelfile.source import ModelSource
from headway.models.shard import Shard
from headway.models.spec import ModelSpec
from headway.runner.lockstep import BeginShard, LockstepExecutor, MakeExecutor, ShardLink, ShardReady

log = logging.getLogger(__name__)

CHILD = ("-P", "-m", "headway.backends.follower")
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadedParallel:
    """A model in the memory of several processes."""

    own: LoadedCpu
    followers: Followers

    @property
    def source(self) -> ModelSource:
        """The files it was read from."""
        return self.own.source

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the whole model."""
        return self.own.spec

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        """As it is, like the CPU's."""
        return config

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        """The executor over all processes; there is one, and they end with it."""
        num_blocks, host_blocks = self.own.count_blocks(config, max_len)
        self.followers.tell(MakeExecutor(config, max_len, num_blocks, host_blocks))
        own = self.own.make_sized(config, max_len, num_blocks, host_blocks)
        return LockstepExecutor(own, self.followers.links, self.followers.close)

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        """As one process would compute: the bits are the same."""
        return self.own.compute_info(config)


class Followers:
    """The processes beside this one, and the sockets to them."""

    def __init__(self, count: int) -> None:
        self.links: list[ShardLink] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                # Its own process group, so that Ctrl-C reaches the first process alone.
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *CHILD, "--fd", str(theirs.fileno())],
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        process_group=0,
                    )
                )
            self.links.append(ShardLink(ours))
        self._finalizer = weakref.finalize(self, _end, self.links, self._processes)

    def tell(self, message: BeginShard | MakeExecutor) -> None:
        """The same to all."""
        frame = self.links[0].encode(message)
        for link in self.links:
            link.send(frame)

    def wait(self) -> None:
        """Until all are loaded; ConfigError or EngineDead if one cannot be."""
        for link in self.links:
            reply = link.receive()
            assert isinstance(reply, ShardReady), reply
            if reply.error:
                raise ConfigError(reply.error) if reply.is_config else EngineDead(reply.error)

    def close(self) -> None:
        """End them; idempotent."""
        self._finalizer()


def _end(links: list[ShardLink], processes: list[subprocess.Popen[bytes]]) -> None:
    for link in links:
        link.close()
    for process in processes:
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load_parallel(config: EngineConfig) -> LoadedParallel:
    """Start the other processes, and load a part of the model into each."""
    size = config.model.tensor_parallel
    if config.model.device != "cpu":
        raise ConfigError(f"tensor_parallel is {size} with device {config.model.device!r}; allowed: 1, or device cpu")
    require_torch("tensor_parallel")
    threads = config.model.threads or max(1, usable_cores() // size)
    config = replace(config, model=replace(config.model, threads=threads))
    followers = Followers(size - 1)
    with ExitStack() as undo, tempfile.TemporaryDirectory(prefix="headway-shards-") as folder:
        undo.callback(followers.close)
        meeting = Path(folder) / "meeting"
        for rank, link in enumerate(followers.links, 1):
            link.send(link.encode(BeginShard(config, rank, size, str(meeting))))
        own, meet = load_part(config, Shard(0, size), meeting)
        followers.wait()
        meet()
        undo.pop_all()
    log.info("%d processes of %d threads compute this model", size, threads)
    return LoadedParallel(own, followers)


def load_part(config: EngineConfig, shard: Shard, meeting: Path) -> tuple[LoadedCpu, Callable[[], None]]:
    """One part of the model, and what finds the others: to be called once all are loaded."""
    from headway.runner.gather import GlooGather, LockstepModel  # imports torch

    gather = GlooGather(shard)
    loaded, decoder = load_shard(config, shard, gather)
    return replace(loaded, decoder=LockstepModel(decoder)), lambda: gather.meet(meeting)


PLUGIN: Backend = load_parallel
