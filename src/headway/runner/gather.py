"""The gather of a model that several processes compute: torch's gloo over the loopback interface.

A process that is lost leaves the others in the middle of a step, with rows that no two of them agree on. So that is no
fault of a row: `ShardLost` is no Exception, and ends the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from headway.kernels.checks import Array
from headway.models.batch import ForwardBatch
from headway.models.decoder import Decoder
from headway.models.pick import Allowed
from headway.models.shard import Shard

TIMEOUT_S = 60.0  # for one gather; what is stopped longer than that is as good as lost


class ShardLost(BaseException):
    """Another process of this model has ended, or does not compute the same step."""


class GlooGather:
    """All processes of a model call it with the same widths in the same order."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._group: ProcessGroupGloo | None = None

    def meet(self, meeting: Path, timeout_s: float = TIMEOUT_S) -> None:
        """Find the other processes, which name the same path; it is not needed any more when all have returned."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        rank, size = self._shard
        try:
            store = FileStore(str(meeting), size)
            store.set_timeout(timedelta(seconds=timeout_s))
            self._group = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise ShardLost(f"the processes of this model did not find each other: {error}") from error
        # Two others may still be looking for each other, by a path that the first to return removes.
        self(np.zeros((1, 1), np.float32), (1,) * size)

    def __call__(self, x: Array, widths: Sequence[int]) -> Array:
        """See `models.shard.Gather`. Gloo takes pieces of one size, so narrower ones are filled up."""
        assert self._group is not None, "gather before meet"
        num_rows, most = x.shape[0], max(widths)
        if x.shape[1] < most:
            padded = np.zeros((num_rows, most), np.float32)
            padded[:, : x.shape[1]] = x
            x = padded
        pieces = [torch.empty((num_rows, most)) for _ in widths]
        try:
            piece = torch.from_numpy(np.ascontiguousarray(x))
            self._group.allgather([pieces], [piece]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ShardLost(f"a process of this model is gone: {error}") from error
        return np.concatenate([each.numpy()[:, :width] for each, width in zip(pieces, widths, strict=True)], axis=1)


class LockstepModel:
    """A decoder whose steps all processes finish, or none: what interrupts one leaves the others waiting."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(self, batch: ForwardBatch, kv: Array) -> NDArray[np.float32]:
        """See `Decoder.forward`."""
        try:
            return self._decoder.forward(batch, kv)
        except BaseException as error:
            raise ShardLost(f"a step of one process failed: {error!r}") from error

    def pick(self, batch: ForwardBatch, kv: Array, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """See `Decoder.pick`."""
        try:
            return self._decoder.pick(batch, kv, allowed)
        except BaseException as error:
            raise ShardLost(f"a step of one process failed: {error!r}") from error
