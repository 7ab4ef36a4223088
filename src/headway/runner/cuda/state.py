"""What the device keeps of every row, as one array of words, and the words a plan changes in it.

    records | tables | stop ids | bias ids | bias values          one line per row, and one that padding may write to

The host never reads it back. A join or growth becomes pokes, (offset, value) pairs that the next step applies before
anything else; of two for one word the later one counts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from headway.errors import RowFailed
from headway.kernels.cuda.layout import MAX_BIASES, MAX_STOPS, RECORD_WORDS, Field, Flag
from headway.runner.rng import key_of
from headway.runner.slots import has_penalties
from headway.values.params import SamplingParams
from headway.values.plan import Grow, Join

MIN_TEMPERATURE = 1e-5  # below, scaled logits would leave float32
MIN_TOP_P = 1e-30  # below, it would leave float32, and 0 of the weight is no token at all
Pokes = dict[int, int]


class DeviceState:
    """Offsets of words: record of a row, its table, its stop ids, its biases."""

    def __init__(self, *, num_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        lines = num_rows + 1
        self.num_rows, self._vocab_size = num_rows, vocab_size
        self._width = -(-max_blocks // 16) * 16  # keeps every table aligned
        sizes = (RECORD_WORDS, self._width, MAX_STOPS, MAX_BIASES, MAX_BIASES)
        self.words = torch.zeros(lines * sum(sizes), dtype=torch.int32, device=device)
        parts = [part.view(lines, -1) for part in torch.split(self.words, [lines * size for size in sizes])]
        self.records, self.tables, self.stops, self.bias_ids, self.bias_values = parts
        self._at = [int(part.storage_offset()) for part in parts]
        # Per row and token of the vocabulary: seen, and how often in the output. Only of rows with penalties.
        self.counts = torch.zeros((lines, vocab_size), dtype=torch.int32, device=device)

    def join(self, join: Join, pokes: Pokes) -> bool:
        """Pokes of a row's new request; whether its tokens must be counted."""
        params, row = join.params, join.row
        stops = [id for id in sorted(join.stop_ids) if 0 <= id < self._vocab_size]  # no other is ever sampled
        if len(stops) > MAX_STOPS or len(params.logit_bias) > MAX_BIASES:
            raise RowFailed(
                f"request {join.id} has {len(stops)} stop tokens and {len(params.logit_bias)} biases; "
                f"this device takes up to {MAX_STOPS} and {MAX_BIASES}"
            )
        is_counted = has_penalties(params)
        self._put(pokes, self._at[0] + row * RECORD_WORDS, _record(join, len(stops), is_counted))
        self._put(pokes, self._at[1] + row * self._width, join.table)
        self._put(pokes, self._at[2] + row * MAX_STOPS, stops)
        self._put(pokes, self._at[3] + row * MAX_BIASES, list(params.logit_bias))
        self._put(pokes, self._at[4] + row * MAX_BIASES, [_bits(value) for value in params.logit_bias.values()])
        return is_counted

    def go_on(self, row: int, length: int, last: int, pokes: Pokes) -> None:
        """Pokes of a row that goes on behind so many cells with that token."""
        at = self._at[0] + row * RECORD_WORDS
        pokes[at + Field.LENGTH], pokes[at + Field.LAST] = length, last

    def grow(self, grow: Grow, pokes: Pokes) -> None:
        self._put(pokes, self._at[1] + grow.row * self._width + grow.index, grow.blocks)

    @staticmethod
    def _put(pokes: Pokes, at: int, values: Sequence[int]) -> None:
        if len(values) == 1:  # the usual growth
            pokes[at] = values[0]
        else:
            pokes.update(zip(range(at, at + len(values)), values, strict=True))


def _record(join: Join, num_stops: int, is_counted: bool) -> list[int]:
    params = join.params
    words = [0] * RECORD_WORDS
    low, high = struct.unpack("<2i", key_of(join.seed).to_bytes(8, "little"))
    words[Field.LENGTH] = join.start
    words[Field.LAST] = join.tokens[-1] if join.tokens else 0
    words[Field.KEY_LOW], words[Field.KEY_HIGH] = low, high
    temperature = 0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE)
    words[Field.TEMPERATURE] = _bits(temperature)
    words[Field.FLAGS] = (Flag.SPECIAL if is_special(params) else 0) | (Flag.COUNTED if is_counted else 0)
    words[Field.TOP_K] = min(params.top_k, 2**31 - 1)
    words[Field.TOP_P], words[Field.MIN_P] = _bits(max(params.top_p, MIN_TOP_P)), _bits(params.min_p)
    words[Field.REPETITION] = _bits(params.repetition_penalty)
    words[Field.PRESENCE], words[Field.FREQUENCY] = _bits(params.presence_penalty), _bits(params.frequency_penalty)
    words[Field.STOPS_FROM] = min(join.num_prompt + params.min_tokens, 2**31 - 1)
    words[Field.NUM_STOPS], words[Field.NUM_BIASES] = num_stops, len(params.logit_bias)
    words[Field.LOGPROBS] = 0 if params.logprobs is None else params.logprobs + 1
    return words


def is_special(params: SamplingParams) -> bool:
    """Whether more than a temperature decides."""
    filters = not params.is_greedy and (params.top_k or params.top_p < 1.0 or params.min_p > 0.0)
    shifts = params.logit_bias or params.min_tokens or has_penalties(params)
    return bool(filters or shifts or params.logprobs is not None)


def _bits(value: float) -> int:
    """A real number's float32 bits as a signed word."""
    (word,) = struct.unpack("<i", struct.pack("<f", value))
    return int(word)
