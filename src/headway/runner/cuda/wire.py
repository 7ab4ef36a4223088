"""Memory that host and device share without copies: packets go in, tokens, times and a flag come out.

    host     write slot c % slots, replay ........ read flags[c % slots] until it is c + 1, then the slot's tokens
    device   counter c: fetch the slot, compute, publish into it, raise its flag, count on

Pinned where there is a CUDA device; plain memory where Triton interprets on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.cuda.layout import HEADER_WORDS, MAX_LOGPROBS, Header


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
