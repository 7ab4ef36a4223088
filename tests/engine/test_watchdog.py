"""What is a stall and what is a long step."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest

from headway.engine.pulse import Activity, Beat, Pulse, PulseReader
from headway.engine.watchdog import ProcessLook, Stall, Watchdog, look_at

WORKING, WAITING, LOADING, SENDING = Activity.WORKING, Activity.WAITING, Activity.LOADING, Activity.SENDING


def seconds_to_stall(
    activity: Activity,
    how: str,
    *,
    expected_s: float = 0.1,
    has_requests: bool = True,
    has_device: bool = False,
    most: float = 2000.0,
) -> float:
    """After so many seconds of the same page a stall is found; infinite: not within `most`."""
    dog, used, now = Watchdog(3.0, has_device=has_device), 0, 0.0
    while now < most:
        used += how == "busy"
        look = None if how == "unseen" else ProcessLook(how == "stopped", how == "starved", used)
        if dog.observe(Beat(5, activity, 9, expected_s), look, has_requests, 0.5) is not None:
            return now
        now += 0.5
    return math.inf


@pytest.mark.parametrize(
    ("activity", "how", "options", "least", "most"),
    [
        (WORKING, "stopped", {}, 3, 4),
        (WORKING, "stopped", {"expected_s": 60.0}, 3, 4),
        (WAITING, "stopped", {}, 3, 4),
        (LOADING, "stopped", {"has_requests": False}, 3, 4),
        (WAITING, "stopped", {"has_requests": False}, math.inf, math.inf),
        (WORKING, "asleep", {}, 3, 4),
        (WORKING, "asleep", {"expected_s": 2.0}, 20, 21),
        (WORKING, "asleep", {"expected_s": math.nan}, 9, 10),
        (WORKING, "asleep", {"expected_s": math.nan, "has_device": True}, 60, 61),
        (WORKING, "asleep", {"has_device": True}, 60, 61),
        (WORKING, "busy", {"has_device": True}, 60, 61),
        (WORKING, "stopped", {"has_device": True}, 3, 4),
        (WORKING, "busy", {}, 9, 10),
        (WORKING, "starved", {}, 9, 10),
        (WORKING, "unseen", {}, 9, 10),
        (WORKING, "busy", {"expected_s": 4.0}, 60, 61),
        (WORKING, "busy", {"expected_s": math.nan}, 600, 601),
        (WAITING, "asleep", {}, math.inf, math.inf),
        (LOADING, "asleep", {}, math.inf, math.inf),
        (LOADING, "busy", {}, math.inf, math.inf),
        (SENDING, "asleep", {}, math.inf, math.inf),
    ],
)
def test_time_without_progress_that_is_a_stall(
    activity: Activity, how: str, options: dict[str, float], least: float, most: float
) -> None:
    assert least <= seconds_to_stall(activity, how, **options) <= most  # type: ignore[arg-type]


def test_any_progress_begins_anew() -> None:
    dog = Watchdog(3.0)
    for turn in range(100):
        for _ in range(5):
            assert dog.observe(Beat(turn, WORKING, 0, 0.1), ProcessLook(True, False, 0), True, 0.5) is None


def test_a_process_that_goes_on_after_a_stop_was_not_stopped_for_long() -> None:
    dog, beat = Watchdog(3.0), Beat(1, WORKING, 0, 10.0)
    for at in range(60):
        assert dog.observe(beat, ProcessLook(at % 5 != 0, True, at), True, 0.5) is None


def test_the_system_tells_stopped_asleep_and_busy_apart() -> None:
    script = "import sys\nsys.stdin.readline()\nx = 0\nwhile True: x += 1"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        try:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            stopped = look_at(child.pid)
            assert stopped is not None
            assert stopped.is_stopped
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write(b"\n")
            child.stdin.flush()
            while (look := look_at(child.pid)) is not None and look.used < stopped.used + 3:
                assert not look.is_stopped or look.used == stopped.used
        finally:
            child.kill()
    assert look_at(child.pid) is None


def test_a_page_carries_what_was_written_and_stacks_beside_it() -> None:
    reader = PulseReader()
    try:
        assert reader.read()[:3] == (0, Activity.LOADING, 0)
        pulse = Pulse(reader.fd)
        assert math.isnan(reader.read().expected_s), "unknown until a step is announced"
        pulse.enter(WORKING)
        pulse.expect(0.25)
        pulse.committed(7)
        assert reader.read() == Beat(1, WORKING, 7, 0.25)
        assert reader.stacks() == ""
        script = (
            "import sys, os, signal\n"
            "from headway.engine.pulse import STACK_SIGNAL, leave_stacks\n"
            "def here(): os.kill(os.getpid(), STACK_SIGNAL); os.kill(os.getpid(), signal.SIGSEGV)\n"
            "leave_stacks(int(sys.argv[1]))\nhere()\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(reader.fd)], pass_fds=(reader.fd,), check=False)
        assert done.returncode == -signal.SIGSEGV
        assert reader.stacks().count("in here") == 2
        assert reader.read() == Beat(1, WORKING, 7, 0.25)
    finally:
        reader.close()


def test_a_stall_says_how_long_and_how() -> None:
    assert str(Stall(3.24, is_stopped=True)) == "no progress for 3.2 s: it is stopped by a signal"
    assert "step does not end" in str(Stall(9.0, is_stopped=False))
