"""How much of the host this process may use: cores and memory, after its affinity and its container's limits.

Containers are read from /proc and /sys, both cgroup versions; what is not there does not limit. Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from headway.errors import ConfigError

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Cores this process may run on, after its affinity and its container's quota."""
    # macOS has no affinity to ask for.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, "cpu"):
        quota = _read(folder / "cpu.max").split()
        if not quota:
            quota = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
            cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that can be taken now: what the machine has available, and what the container's limits leave."""
    available = _field(_read(root / "proc/meminfo"), "MemAvailable:")
    if available is not None:
        free = available * 1024
    elif (root / "proc").is_dir():
        raise ConfigError(f"{root / 'proc/meminfo'} does not say how much memory is available; set kv_memory_gb")
    else:  # macOS: what is free changes as caches shrink; half of what there is may be taken
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for folder in _cgroup_folders(root, "memory"):
        room = _cgroup_room(folder)
        if room is not None:
            free = min(free, room)
    return free


def _cgroup_room(folder: Path) -> int | None:
    """What a memory cgroup leaves; pages it can drop at once do not count as used."""
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        if limit.isdigit() and used.isdigit():
            cached = _field(_read(folder / "memory.stat"), cache_key) or 0
            return max(0, int(limit) - max(0, int(used) - cached))
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Every folder whose limits bind this process: its own cgroup and all above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        # A container often sees its own cgroup mounted as the root of the tree.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _field(text: str, key: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None
