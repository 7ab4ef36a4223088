"""Blocks in host memory: those used last, up to a number of bytes. Lost with the process."""

from __future__ import annotations

from collections import OrderedDict

from headway.engine.tier.record import Buffer


class HostTier:
    """`num_bytes` never exceeds the limit. One thread changes it; others may ask `has`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, key: bytes, data: Buffer) -> bool:
        """Keep a block, at the expense of those not used for longest; False: it is larger than all there is."""
        if len(data) > self._limit_bytes:
            return False
        if key not in self._blocks:
            self._blocks[key] = bytes(data)
            self.num_bytes += len(data)
        self._blocks.move_to_end(key)
        while self.num_bytes > self._limit_bytes:
            self.num_bytes -= len(self._blocks.popitem(last=False)[1])
        return True

    def get(self, key: bytes) -> bytes | None:
        data = self._blocks.get(key)
        if data is not None:
            self._blocks.move_to_end(key)
        return data
