"""Several executors that run the same plans: each computes its part of the model, and all come to the same tokens.

    engine ─▶ LockstepExecutor ─▶ its own executor ─▶ results
                   │ every plan, first                     ▲ gather, in every layer
                   └──────────▶ follower: run, forget ─────┘

A plan is complete, sampling is a function of seed and position, and every process has all logits: so followers need no
answer to be told and give none. This file owns what passes between them; `backends.parallel` starts them.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.config import EngineConfig
from headway.engine.executor import Capacity, Executor, Late
from headway.errors import EngineDead
from headway.values.plan import BlockCopy, Chunk, Grow, Join, StepPlan, StepResult

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class BeginShard:
    """The first message: which part of which model."""

    config: EngineConfig
    rank: int
    size: int
    meeting: str  # a path; processes that name the same find each other


@dataclass(frozen=True, slots=True)
class MakeExecutor:
    """The second message: an executor of these sizes."""

    config: EngineConfig
    max_len: int
    num_blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A plan in types that travel, and what it lacks."""

    id: int
    decode: list[int]
    chunks: Sequence[Chunk]
    joins: Sequence[Join]
    leaves: Sequence[int]
    grows: Sequence[Grow]
    copies: Sequence[BlockCopy]
    steps: int
    released: Sequence[int]
    late: Late

    @classmethod
    def of(cls, plan: StepPlan, late: Late) -> RunPlan:
        columns = (plan.chunks, plan.joins, plan.leaves, plan.grows, plan.copies)
        return cls(plan.id, plan.decode.tolist(), *columns, plan.steps, plan.released, late)

    def plan(self) -> StepPlan:
        """The plan; its work, which is for cost models, stays behind."""
        decode = array("i", self.decode)
        columns = (self.chunks, self.joins, self.leaves, self.grows, self.copies)
        return StepPlan(self.id, decode, *columns, steps=self.steps, released=self.released)


@dataclass(frozen=True, slots=True)
class ShardReady:
    """The answer to `BeginShard`; `error` says why there is none."""

    error: str = ""
    is_config: bool = False


class _BeginFrame(msgspec.Struct, tag=0, array_like=True):
    value: BeginShard


class _MakeFrame(msgspec.Struct, tag=1, array_like=True):
    value: MakeExecutor


class _RunFrame(msgspec.Struct, tag=2, array_like=True):
    value: RunPlan


class _ReadyFrame(msgspec.Struct, tag=3, array_like=True):
    value: ShardReady


ShardMessage = BeginShard | MakeExecutor | RunPlan | ShardReady
_FRAMES: dict[type, Any] = {
    BeginShard: _BeginFrame,
    MakeExecutor: _MakeFrame,
    RunPlan: _RunFrame,
    ShardReady: _ReadyFrame,
}


class ShardLink:
    """Messages in order over one socket; both ends trust each other, and an end that closes ends the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_BeginFrame | _MakeFrame | _RunFrame | _ReadyFrame)

    def encode(self, message: ShardMessage) -> bytes:
        """One frame, for any number of links."""
        body = self._encoder.encode(_FRAMES[type(message)](message))
        return _LENGTH.pack(len(body)) + body

    def send(self, frame: bytes) -> None:
        """EngineDead if the other process has ended."""
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise EngineDead(f"a process of this model has ended: {error}") from error

    def receive(self) -> ShardMessage:
        """Wait for the next message; EngineDead if the other process has ended."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        message: ShardMessage = self._decoder.decode(self._exactly(length)).value
        return message

    def close(self) -> None:
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < count:
            try:
                data = self._sock.recv(count - len(buffer))
            except OSError as error:
                raise EngineDead(f"a process of this model has ended: {error}") from error
            if not data:
                raise EngineDead("a process of this model has ended")
            buffer += data
        return bytes(buffer)


class LockstepExecutor:
    """The executor of the first process. Followers have a plan before it begins, so none waits for them for ever."""

    def __init__(self, own: Executor, links: Sequence[ShardLink], on_close: Callable[[], None]) -> None:
        self._own = own
        self._links = links
        self._on_close = on_close
        self._late: dict[int, Late] = {}

    def capacity(self) -> Capacity:
        """Blocks and rows: all processes have the same."""
        return self._own.capacity()

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to the followers and queue it here."""
        frame = self._links[0].encode(RunPlan.of(plan, self._late.pop(plan.id, Late())))
        for link in self._links:
            link.send(frame)
        self._own.submit(plan)

    def supply(self, plan_id: int, late: Late) -> None:
        """Masks of a plan that is about to be submitted."""
        self._own.supply(plan_id, late)
        self._late[plan_id] = late

    def collect(self) -> StepResult:
        """What the oldest uncollected plan did, by this process; the others did the same."""
        return self._own.collect()

    def close(self) -> None:
        """End it and the followers; idempotent."""
        self._own.close()
        self._on_close()


def follow(link: ShardLink, make: Callable[[MakeExecutor], Executor]) -> None:
    """Run plans for ever; raises EngineDead when the first process has ended."""
    first = link.receive()
    assert isinstance(first, MakeExecutor), first
    executor = make(first)
    while True:
        message = link.receive()
        assert isinstance(message, RunPlan), message
        if message.late:
            executor.supply(message.id, message.late)
        executor.submit(message.plan())
        executor.collect()
