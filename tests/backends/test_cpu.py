"""The CPU backend: threads, kernels, and what a container leaves of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.backends import _host as host
from headway.backends import cpu
from headway.errors import ConfigError

GIB = 2**30


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A /proc and /sys with 8 GiB available and the given files beside it."""
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_device_runs_on_the_threads_asked_for() -> None:
    device = cpu.open_device("ref", 1)
    assert (device.threads, device.kernels.name) == (1, "ref")
    assert torch.get_num_threads() == 1
    assert device.dtype == "float32"
    assert 0 < device.free_bytes() < 2**50


def test_threads_default_to_the_usable_cores() -> None:
    assert cpu.open_device("ref").threads == host.usable_cores() <= len(os.sched_getaffinity(0))


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    assert host.free_memory(machine(tmp_path, {})) == 8 * GIB


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/../../elsewhere\n",
                "sys/fs/cgroup/memory.max": f"{3 * GIB}",
                "sys/fs/cgroup/memory.current": f"{GIB}",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n4:memory:/box\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/full\n",
                "sys/fs/cgroup/full/memory.max": "100",
                "sys/fs/cgroup/full/memory.current": "200",
            },
            0,
        ),
        ({"proc/self/cgroup": "0::/gone\nrubbish\n"}, 8 * GIB),
    ],
)
def test_container_limits_bind(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert host.free_memory(machine(tmp_path, files)) == free


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"},
        {
            "proc/self/cgroup": "2:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "90000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_cpu_quota_limits_the_cores(files: dict[str, str], tmp_path: Path) -> None:
    assert host.usable_cores(machine(tmp_path, files)) == 1


def test_no_quota_leaves_the_affinity(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}
    assert host.usable_cores(machine(tmp_path, files)) == len(os.sched_getaffinity(0))


def test_a_machine_without_proc_and_affinity_offers_its_cores_and_half_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert host.usable_cores(tmp_path) == os.cpu_count()
    assert host.free_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_unreadable_memory_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not say how much memory is available; set kv_memory_gb"):
        host.free_memory(machine(tmp_path, {"proc/meminfo": "MemTotal: 99 kB\n"}))


@pytest.mark.parametrize("dtype", ["fp8", "float16"])
def test_formats_are_refused_where_no_kernel_computes_in_them(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype is '{dtype}', which only a CUDA device"):
        cpu.open_device(dtype=dtype)
