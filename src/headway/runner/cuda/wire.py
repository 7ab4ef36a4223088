"""Memory that host and device share without copies: packets go in, tokens, times and a flag come out.

    host     write slot c % slots, replay ........ read flags[c % slots] until it is c + 1, then the slot's tokens
    device   counter c: fetch the slot, compute, publish into it, raise its flag, count on

Pinned where there is a CUDA device; plain memory where Triton interprets on the CPU.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headway.kernels.cuda.layout import HEADER_WORDS, MAX_LOGPROBS, Header
from headway.values.plan import TokenLogprob


class Wire:
    """A slot belongs to one step from its packet's first word until its tokens are read."""

    def __init__(self, *, slots: int, words: int, lines: int, device: torch.device) -> None:
        def shared(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
            memory = torch.zeros(shape, dtype=dtype)
            return memory.pin_memory() if device.type == "cuda" else memory

        self.slots = slots
        self.lines = lines
        self.packets = shared((slots, words))
        # Empty packets: a header that asks for nothing. It must still be fetched, or the last step's would count again.
        self.packets[:, Header.NUM_WORDS] = HEADER_WORDS
        self.tokens = shared((slots, lines))
        self.flags = shared((slots,))
        self.times = shared((slots, 2), torch.int64)  # of the device's clock, in nanoseconds: begin and end
        self.logprobs = shared((slots, lines, MAX_LOGPROBS + 1), torch.float32)
        self.logprob_ids = shared((slots, lines, MAX_LOGPROBS + 1))
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.began = torch.zeros(1, dtype=torch.int64, device=device)  # 0 between steps

    def logprobs_of(
        self, slot: int, wanted: Iterable[tuple[int, int, int]], counts: Mapping[int, int], failed: Container[int]
    ) -> dict[int, Sequence[TokenLogprob]]:
        """By row, from (entry, row, how many alternatives): of the first so many tokens as `counts` says, or of one."""
        values, ids = self.logprobs[slot], self.logprob_ids[slot]
        found: dict[int, list[TokenLogprob]] = {}
        for entry, row, num in wanted:
            if row not in failed and len(found.get(row, ())) < counts.get(row, 1):
                mine, tokens = values[entry].tolist(), ids[entry].tolist()
                top = tuple(zip(tokens[1 : num + 1], mine[1 : num + 1], strict=True))
                found.setdefault(row, []).append(TokenLogprob(mine[0], top))
        return {**found}
