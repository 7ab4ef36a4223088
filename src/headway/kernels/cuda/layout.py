"""The words that host and device agree on: a packet's header, a row's record, the bits of a sampled token.

Owns numbers alone. A packet is int32 words in pinned memory, one per step; a record is what the device keeps of a row.

    packet   header | decode rows | tokens, positions, rows of chunks | ends of chunks | samples | prefill items |
             masks | pokes

A poke is (offset, value): one word of the device's state that changes before the step.
"""

from __future__ import annotations

from enum import IntEnum

HEADER_WORDS = 32
RECORD_WORDS = 16
ITEM_WORDS = 8  # of prefill attention
MAX_STOPS = 128  # token ids that end a request
MAX_BIASES = 1024  # token ids whose logits are shifted
MAX_LOGPROBS = 20


class Header(IntEnum):
    """Counts of a packet's sections, then where they begin, in words from the packet's start."""

    NUM_DECODE = 0
    NUM_TOKENS = 1  # of chunks
    NUM_CHUNKS = 2
    NUM_SAMPLES = 3  # of chunks; every decode row samples
    NUM_ITEMS = 4
    NUM_POKES = 5
    NUM_WORDS = 6  # of everything before the pokes
    NUM_MASKED = 7  # sampled entries, those without a mask too; 0: there is no mask at all
    TOKENS = 8
    POSITIONS = 9
    TOKEN_ROWS = 10
    CHUNKS = 11  # (row, end) pairs
    SAMPLES = 12  # (token of the step, row, position of what is sampled) triples
    ITEMS = 13
    POKES = 14  # offsets, then values
    MASKS = 15  # for each sampled entry where its mask begins, or 0; then the masks, a bit per token, lowest first


class Field(IntEnum):
    """Words of a row's record; real numbers are kept by their bits."""

    LENGTH = 0  # cells that hold KV
    LAST = 1  # newest token, not computed yet
    KEY_LOW = 2  # of the random generator
    KEY_HIGH = 3
    TEMPERATURE = 4
    FLAGS = 5
    TOP_K = 6
    TOP_P = 7
    MIN_P = 8
    REPETITION = 9
    PRESENCE = 10
    FREQUENCY = 11
    STOPS_FROM = 12  # first position at which a stop token may be sampled
    NUM_STOPS = 13
    NUM_BIASES = 14
    LOGPROBS = 15  # 0: none; k + 1: the sampled token's and the k most likely


class Flag(IntEnum):
    """Bits of FLAGS."""

    SPECIAL = 1  # not just a temperature
    COUNTED = 2  # its tokens are counted, for penalties


class Status(IntEnum):
    """Bits of a sampled token's word above the token."""

    STOPPED = 1 << 30
    NOT_FINITE = 1 << 29
    MASKED = 1 << 28


TOKEN_BITS = (1 << 28) - 1
SEEN = 1 << 30  # of a count: the token is in the prompt or the output; the bits below count the output
COUNTER_MASK = (1 << 30) - 1  # steps are counted modulo 2**30, a multiple of every number of slots
