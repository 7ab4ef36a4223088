"""Which cell of a fleet gets a request: the same for the same prefix, and another one if that cell is too busy.

Each cell is a fleet with fronts, a route and an index of its own, so that neither grows with the whole. Every prefix
has an order of all cells by a hash: when a cell comes or goes, only its own prefixes move. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256

_SPARE = 4.0  # requests for each replica: with few of them a ratio says little


class CellChoice:
    """A prefix is the first `num_blocks` blocks of a prompt."""

    def __init__(self, num_cells: int, num_blocks: int, spill: float) -> None:
        self._names = [number.to_bytes(4, "little") for number in range(num_cells)]
        self._num_blocks = num_blocks
        self._spill = spill  # a cell with more than so many times the mean load gives requests on; 0: it never does

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        """The first cell of the prefix or its second one, by requests for each replica; infinite: none is up."""
        if len(self._names) == 1:
            return 0
        prefix = b"".join(block.to_bytes(8, "little") for block in blocks[: self._num_blocks])
        ranks = [sha256(name + prefix).digest() for name in self._names]
        first = max(range(len(ranks)), key=ranks.__getitem__)
        if not self._spill and loads[first] < math.inf:
            return first
        second = max((at for at in range(len(ranks)) if at != first), key=ranks.__getitem__)
        usable = [load for load in loads if load < math.inf]
        if not usable:
            return first
        most = self._spill * sum(usable) / len(usable) + _SPARE if self._spill else math.inf
        is_too_busy = loads[first] > most or loads[first] == math.inf
        return second if is_too_busy and loads[second] < loads[first] else first
