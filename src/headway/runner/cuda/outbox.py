"""Blocks on their way to host memory: set aside on the device, then sent over the bus while steps compute.

    steps' stream    [gather 38 blocks, 0.1 ms][step ...............................]
    own stream                                 [bus, 1.6 ms]
    host             gather, then the step, then what goes over the bus

Copying straight to the host would hold up the step by the time the bus takes, because the blocks are to be written
again at once. What is read from the host waits for what is still on its way there, and only for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cuda.blocks import copy_blocks

MOST_BYTES = 256 << 20  # of device memory for blocks on their way; within what `working_bytes` counts


@dataclass(slots=True)
class _Batch:
    """Blocks that go together."""

    first: int  # place
    hosts: tuple[int, ...]
    gathered: torch.cuda.Event | None  # None where there is no device
    sent: torch.cuda.Event | None = None  # None: not yet under way, or there is no device


class Outbox:
    """A place is written again only when its last block has arrived; batches arrive in the order they were sent.

    Every call is made under the stream on which steps are queued.
    """

    def __init__(self, device_words: Tensor, host_words: Tensor) -> None:
        """`device_words` [planes, blocks, words]; `host_words` [blocks, planes, words], pinned."""
        self._device, self._host = device_words, host_words
        size = host_words[0].nbytes
        self.num_places = max(1, min(len(host_words), MOST_BYTES // size))
        shape = (self.num_places, *host_words.shape[1:])
        self._places = torch.empty(shape, dtype=host_words.dtype, device=device_words.device)
        self._stream: torch.cuda.Stream | None = None
        if device_words.is_cuda:
            self._stream = torch.cuda.Stream(device_words.device)  # type: ignore[no-untyped-call]
        self._next = self._taken = 0
        self._gathered: list[_Batch] = []  # not yet under way
        self._batches: deque[_Batch] = deque()  # under way

    def rehearse(self, ids: Tensor) -> None:
        """Launch either way for no block."""
        copy_blocks(self._device, self._places, ids, 0, dst_host=True)
        copy_blocks(self._host, self._device, ids, 0, src_host=True)

    def gather(self, blocks: Sequence[int], hosts: Sequence[int]) -> list[Tensor]:
        """Queue that each block is set aside for its host block; what is returned must live until that has run."""
        held = []
        while blocks:
            num = min(len(blocks), self.num_places - self._next)
            held.append(self._gather(blocks[:num], tuple(hosts[:num])))
            blocks, hosts = blocks[num:], hosts[num:]
        return held

    def send(self) -> None:
        """Queue the way over the bus of all that was gathered: 38 scattered host blocks take the host 0.4 ms."""
        for batch in self._gathered:
            if self._stream is None or batch.gathered is None:
                self._carry(batch)
            else:
                self._stream.wait_event(batch.gathered)
                with torch.cuda.stream(self._stream):
                    self._carry(batch)
                batch.sent = self._stream.record_event()
        self._batches += self._gathered
        self._gathered.clear()

    def arrived(self, hosts: Collection[int]) -> Tensor:
        """The host's blocks; what is queued from now on finds these of them as they were sent."""
        self.send()
        late = [batch.sent for batch in self._batches if not set(hosts).isdisjoint(batch.hosts)]
        if late and late[-1] is not None:
            torch.cuda.current_stream().wait_event(late[-1])
        return self._host

    def _gather(self, blocks: Sequence[int], hosts: tuple[int, ...]) -> Tensor:
        """As `gather`, for blocks whose places are adjacent."""
        num, first = len(blocks), self._next
        self._make_room(num)
        ids = torch.from_numpy(np.array([*blocks, *range(first, first + num)], np.int32))
        ids = ids.pin_memory() if self._stream is not None else ids
        copy_blocks(self._device, self._places, ids, num, dst_host=True)
        gathered = None if self._stream is None else torch.cuda.current_stream().record_event()
        self._gathered.append(_Batch(first, hosts, gathered))
        self._taken += num
        self._next = (first + num) % self.num_places
        return ids

    def _make_room(self, num: int) -> None:
        if self._taken + num > self.num_places:
            self.send()
        while self._batches and (self._taken + num > self.num_places or _is_there(self._batches[0])):
            batch = self._batches.popleft()
            self._taken -= len(batch.hosts)
            if batch.sent is not None:
                torch.cuda.current_stream().wait_event(batch.sent)

    def _carry(self, batch: _Batch) -> None:
        """From a batch's places to its host blocks; those that are adjacent at once."""
        start, first, hosts = 0, batch.first, batch.hosts
        for end in range(1, len(hosts) + 1):
            if end == len(hosts) or hosts[end] != hosts[end - 1] + 1:
                to = self._host[hosts[start] : hosts[start] + end - start]
                to.copy_(self._places[first + start : first + end], non_blocking=True)
                start = end


def _is_there(batch: _Batch) -> bool:
    return batch.sent is None or bool(batch.sent.query())  # type: ignore[no-untyped-call]
