"""Whether an engine makes progress: from what its page shows and what the system says about its process.

A long step is no stall. What an engine may take without a change of its page depends on what it is in:

    stopped by a signal            `stall_s`
    in a step, asleep              `stall_s`, or ten times the step's predicted length
    in a step, computing           three times `stall_s`, or fifteen times the predicted length
    loading, or with no request    for ever

A step on another device waits for it asleep, and may have a kernel compiled first: there both are 20 times `stall_s`.
Pure but for `look_at`; the clock and what to do about a stall are the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headway.engine.pulse import Activity, Beat

_ASLEEP, _BUSY = 10.0, 15.0  # times the predicted length
_BUSY_S = 3.0  # times `stall_s`
_DEVICE_S = 20.0  # likewise
_UNKNOWN_BUSY_S = 600.0  # a first step may have to read and convert much


class ProcessLook(NamedTuple):
    """What the system says about a process."""

    is_stopped: bool
    is_runnable: bool  # it runs, waits for a core, or waits for a disk
    used: int  # grows with every tick of processor time and every page read from a disk


def look_at(pid: int) -> ProcessLook | None:
    """None where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a name may hold anything, blanks and parentheses too
    state, faults, user, system = fields[0], *(int(fields[at]) for at in (9, 11, 12))
    return ProcessLook(state in "Tt", state in "RD", faults + user + system)


@dataclass(frozen=True, slots=True)
class Stall:
    """An engine stands still."""

    seconds: float
    is_stopped: bool  # by a signal from outside: no request is to blame

    def __str__(self) -> str:
        how = "it is stopped by a signal" if self.is_stopped else "its step does not end"
        return f"no progress for {self.seconds:.1f} s: {how}"


class Watchdog:
    """Counts the time that passes between looks, not that by a clock: a gap without a look proves nothing."""

    def __init__(self, stall_s: float, *, has_device: bool = False) -> None:
        self._stall_s = stall_s
        self._asleep_limit_s = _DEVICE_S * stall_s if has_device else stall_s
        self._busy_limit_s = (_DEVICE_S if has_device else _BUSY_S) * stall_s
        self._turns = -1
        self._still_s = 0.0
        self._asleep_s = 0.0
        self._stopped_s = 0.0
        self._used = -1

    def observe(self, beat: Beat, look: ProcessLook | None, has_requests: bool, passed_s: float) -> Stall | None:
        """Look once more, `passed_s` after the last time; a stall if the engine stands still for too long."""
        if beat.turns != self._turns:
            self._turns, self._used = beat.turns, -1
            self._still_s = self._asleep_s = self._stopped_s = 0.0
            return None
        is_stopped = look is not None and look.is_stopped
        is_asleep = look is not None and not look.is_runnable and look.used == self._used
        self._used = -1 if look is None else look.used
        self._still_s += passed_s
        self._stopped_s = self._stopped_s + passed_s if is_stopped else 0.0
        self._asleep_s = self._asleep_s + passed_s if is_asleep else 0.0
        concerns = has_requests or beat.activity in (Activity.LOADING, Activity.WORKING)
        if is_stopped:
            is_over = concerns and self._stopped_s >= self._stall_s
            return Stall(self._stopped_s, is_stopped=True) if is_over else None
        if beat.activity is not Activity.WORKING:
            return None
        is_known = not math.isnan(beat.expected_s)
        asleep_s = max(self._asleep_limit_s, _ASLEEP * beat.expected_s) if is_known else self._busy_limit_s
        busy_s = max(self._busy_limit_s, _BUSY * beat.expected_s) if is_known else _UNKNOWN_BUSY_S
        if self._asleep_s >= asleep_s:
            return Stall(self._asleep_s, is_stopped=False)
        return Stall(self._still_s, is_stopped=False) if self._still_s >= busy_s else None
