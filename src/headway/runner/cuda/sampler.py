"""Sampling as the last kernels of a step: logits in, tokens in the rows' records and in pinned memory.

It owns the buffers between these kernels. What a row asks for stands in its record; nothing here waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.kernels.cuda import sampling, special
from headway.kernels.cuda.launch import Launch, pow2
from headway.runner.cuda.state import DeviceState
from headway.runner.cuda.wire import Wire

_SPECIAL_CHUNK = 4096


class DeviceSampler:
    """Up to `lines` rows at once; a row's token depends on that row alone."""

    def __init__(self, state: DeviceState, launch: Launch, *, lines: int, vocab_size: int) -> None:
        self._state, self._launch, self._vocab_size = state, launch, vocab_size
        device = state.words.device
        self._chunks = triton.cdiv(vocab_size, sampling.CHUNK)
        size = lines * self._chunks
        self._part_max = torch.zeros(size, dtype=torch.float32, device=device)
        self._part_sum = torch.zeros(size, dtype=torch.float32, device=device)
        self._part_token = torch.zeros(size, dtype=torch.int32, device=device)
        self._scratch = torch.zeros((lines, vocab_size), dtype=torch.float32, device=device)
        self._tokens = torch.zeros(lines, dtype=torch.int32, device=device)

    def launch(
        self, logits: Tensor, rows: Tensor, places: Tensor, packet: Tensor, wire: Wire, *, is_special: bool
    ) -> None:
        """Sample from line i of logits [S, vocab] the token at places[i] of row rows[i], publish all, raise the flag.

        Masks stand in the step's packet. `is_special`: some row may ask for more than a temperature, or has a mask.
        """
        state, vocab, chunks, num = self._state, self._vocab_size, self._chunks, len(logits)
        shared = (self._part_max, self._part_token, self._part_sum)
        options = self._launch.options()
        sampling.parts[(num, chunks)](
            *(logits, rows, state.records, *shared, vocab, chunks), CH=sampling.CHUNK, num_warps=4, **options
        )
        sampling.draw[(num,)](
            *(logits, rows, places, state.records, state.stops, state.counts, *shared, self._tokens, vocab, chunks),
            **{"CH": sampling.CHUNK, "NP": pow2(chunks), "num_warps": 8},
            **options,
        )
        if is_special:
            special.special[(num,)](
                *(logits, self._scratch, rows, places, packet, state.records, state.stops, state.bias_ids),
                *(
                    state.bias_values,
                    state.counts,
                    self._tokens,
                    wire.logprobs,
                    wire.logprob_ids,
                    wire.counter,
                    vocab,
                    wire.lines,
                ),
                **{"SLOTS": wire.slots, "CH": _SPECIAL_CHUNK, "num_warps": 8},
                **options,
            )
        sampling.publish[(1,)](
            *(self._tokens, wire.tokens, wire.flags, wire.counter, wire.began, wire.times, num),
            **{"SLOTS": wire.slots, "BLOCK": wire.lines, "CLOCK": rows.is_cuda, "num_warps": 8},
        )
