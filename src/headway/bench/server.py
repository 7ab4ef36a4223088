"""A real `headway serve` as a child of a bench: started, awaited, its memory measured, ended without leftovers.

Knows processes and /proc; what is asked of the server is the benches' business.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from headway.errors import ConfigError, EngineError

COMMAND = (sys.executable, "-P", "-m", "headway.cli.main", "serve", "--port", "0")
_STOP_S = 30.0
_EXIT_S = 1.0


class ServerProcess:
    """A server on a free port with its children. Inside the `with` it is ready; after it, all of them have ended."""

    def __init__(self, flags: Sequence[str], command: Sequence[str] = ()) -> None:
        self.url = ""
        self.ready_s = 0.0  # from the start of the process to an answer of /ready
        self._command = [*(command or COMMAND), *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log)
            self._process = process
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline().decode())
            if found is None:
                raise ConfigError(f"headway serve did not start: {self._last_words()}")
            self.url = found.group()
            with urllib.request.urlopen(f"{self.url}/ready") as answer:
                if answer.status != 200:
                    raise EngineError(f"{self.url}/ready says {answer.status} after the server announced itself")
        except BaseException:
            self._end()
            raise
        self.ready_s = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._end()
        if left and error is None:
            raise EngineError(f"headway serve has ended and left the processes {left} behind; this is a bug of headway")

    def resident_bytes(self) -> int:
        """Resident memory of the server and all its children, summed; shared pages count for each."""
        assert self._process is not None
        return sum(_resident(pid) for pid in family(self._process.pid))

    def proportional_bytes(self) -> int:
        """The same with each shared page split among the processes that map it; 0 where the system does not say."""
        assert self._process is not None
        return sum(_proportional(pid) for pid in family(self._process.pid))

    def _end(self) -> list[int]:
        """End the server by SIGTERM, or by force if that fails; return its children that still run."""
        process = self._process
        if process is None:
            self._log.close()
            return []
        members = family(process.pid) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._log.close()
        left = _still_there([pid for pid in members if pid != process.pid])
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def _last_words(self) -> str:
        assert self._process is not None
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("headway: ") if lines else f"exit code {self._process.returncode}"


def family(pid: int) -> list[int]:
    """A process and its descendants that were not reparented."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:  # grows while it is walked
        found += children.get(member, [])
    return found


def _still_there(pids: Sequence[int]) -> list[int]:
    """The processes that do not end within a moment; exiting takes the system some time."""
    deadline = time.monotonic() + _EXIT_S
    while left := [pid for pid in pids if next(iter(_stat(pid)), "Z") != "Z"]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def _stat(pid: int) -> list[str]:
    """State, parent, ...: the fields of /proc/PID/stat behind the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
