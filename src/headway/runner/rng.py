"""Randomness without state: a uniform number is a pure function of (seed, position).

It owns one mixing function and knows no request. Since nothing is carried from draw to draw, a request that is
preempted, moved or batched differently draws the same number for the same position.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: consecutive counters land far apart
_SALT = 0xD1B54A32D192ED03  # keeps seed 0 from being a fixed point of the first mix


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds of either sign count modulo 2**64.

    The seed is mixed on its own first: neighbouring seeds would otherwise give one sequence, shifted.
    """
    return (_mix((key_of(seed) + (position + 1) * _STEP) & _WORD) >> 11) * 2.0**-53


def key_of(seed: int) -> int:
    """The mixed seed, common to all numbers of a seed; a device that draws by itself gets this."""
    return _mix((seed & _WORD) ^ _SALT)


def _mix(x: int) -> int:
    """The splitmix64 finalizer: a bijection in which each input bit flips about half of the output bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
