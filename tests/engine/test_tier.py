"""Blocks outside the pool: every broken byte is a miss, killed writers leave nothing wrong, folders can be shared."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headway.engine.client import EngineInfo
from headway.engine.tier.disk import DiskTier
from headway.engine.tier.host import HostTier
from headway.engine.tier.keeper import BlockKeeper
from headway.engine.tier.make import block_identity
from headway.engine.tier.record import HEADER_BYTES, checksum, is_whole, pack_header, unpack_header
from headway.errors import ConfigError

SIZE = 96  # bytes of a block
IDENTITY = bytes(range(32))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def disk(folder: Path, limit: int = 1 << 20, identity: bytes = IDENTITY, size: int = SIZE) -> DiskTier:
    return DiskTier(folder / "kv", limit, identity, size)


def filled(folder: Path, count: int = 5) -> Path:
    """The one segment of a tier with so many blocks."""
    tier = disk(folder)
    assert all(tier.put(key(i), block(i)) for i in range(count))
    tier.close()
    (path,) = (folder / "kv").glob("*/*.kv")
    return path


def found(tier: DiskTier, count: int = 5) -> list[bool]:
    """Which blocks are there; one that is there is right."""
    got = [tier.get(key(i)) for i in range(count)]
    assert all(data is None or data == block(i) for i, data in enumerate(got))
    return [data is not None for data in got]


COMPUTES_WITH = ("kernels", "kernels_fallback", "kernels_digest", "source_digest", "dtype", "kv_dtype")


@pytest.mark.parametrize("name", ["identity", *COMPUTES_WITH])
def test_blocks_are_known_by_all_that_their_bits_depend_on(name: str) -> None:
    info = EngineInfo("m", 512, 320, 16, 64, 8, identity="m:1", kernels="avx2", dtype="float32", kv_dtype="float16")
    assert set(info.computes_with()) == set(COMPUTES_WITH)
    assert block_identity(info, "2x4") == block_identity(replace(info, num_blocks=9, max_num_seqs=3), "2x4")
    assert block_identity(info, "2x4") != block_identity(info, "2x8")
    other = replace(info, **{name: "another"})  # type: ignore[arg-type]
    assert block_identity(info, "2x4") != block_identity(other, "2x4")


def test_a_header_says_what_was_packed_and_any_flipped_bit_is_noticed() -> None:
    raw = pack_header(key(7), SIZE, checksum(block(7)))
    header = unpack_header(raw)
    assert header is not None
    assert len(raw) == HEADER_BYTES
    assert (header.key, is_whole(header, block(7))) == (key(7), True)
    assert not is_whole(header, block(7)[:-1])
    for bit in range(8 * len(raw)):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        assert unpack_header(broken) is None
    for bit in range(8 * SIZE):
        data = bytearray(block(7))
        data[bit // 8] ^= 1 << bit % 8
        assert not is_whole(header, data)
    assert unpack_header(raw[:-1]) is None


def test_blocks_are_there_after_the_process_has_ended(tmp_path: Path) -> None:
    filled(tmp_path)
    assert found(disk(tmp_path)) == [True] * 5
    assert disk(tmp_path).get(key(9)) is None


def test_every_flipped_byte_of_a_segment_is_a_miss_and_never_a_wrong_block(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        there = found(disk(tmp_path), 3)
        assert not all(there), f"byte {at} does not matter"


def test_a_segment_cut_at_any_byte_has_the_blocks_before_the_cut(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        num_whole = max(0, (at - 40) // (HEADER_BYTES + SIZE))
        assert found(disk(tmp_path), 3) == [i < num_whole for i in range(3)]


def test_a_record_under_another_key_is_not_found_by_it(tmp_path: Path) -> None:
    path = filled(tmp_path, 2)
    whole = bytearray(path.read_bytes())
    whole[40 : 40 + HEADER_BYTES] = pack_header(key(1), SIZE, checksum(block(1)))  # another block's header
    path.write_bytes(whole)
    tier = disk(tmp_path)
    assert tier.get(key(0)) is None
    assert tier.get(key(1)) is None
    assert tier.num_corrupt == 1


@pytest.mark.parametrize("change", [{"identity": bytes(32)}, {"size": SIZE // 2}, {"size": SIZE * 2}])
def test_another_identity_or_layout_never_hits(tmp_path: Path, change: dict[str, object]) -> None:
    path = filled(tmp_path)
    other = disk(tmp_path, **change)  # type: ignore[arg-type]
    assert found_any(other) == 0
    if "identity" in change:  # nor if the file lies in its folder
        path.rename(next(folder for folder in (tmp_path / "kv").iterdir() if folder != path.parent) / path.name)
        other.refresh()
        assert found_any(other) == 0


def found_any(tier: DiskTier) -> int:
    return sum(tier.get(key(i)) is not None for i in range(5))


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = filled(tmp_path)
    assert [oct(each.stat().st_mode)[-3:] for each in (path, path.parent, path.parent.parent)] == ["600", "700", "700"]


def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        disk(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        DiskTier(tmp_path / "file" / "kv", 1 << 20, IDENTITY, SIZE)


def test_the_least_recently_used_segment_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    limit = 40 * (HEADER_BYTES + SIZE)
    tier = disk(tmp_path, limit)
    for i in range(30):
        assert tier.put(key(i), block(i))
    segments = sorted((tmp_path / "kv").glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    for at, path in enumerate(segments):  # all long ago, in order, and the first used just now
        os.utime(path, (at, at))
    assert tier.get(key(0)) is not None
    for i in range(100, 130):
        assert tier.put(key(i), block(i))
        assert sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*.kv")) <= limit
    assert tier.get(key(0)) is not None, "it was used"
    assert tier.get(key(8)) is None
    assert tier.get(key(129)) is not None


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("room", [10, 41, 200, 300])
def test_a_full_disk_is_a_miss_and_what_was_written_stays(tmp_path: Path, room: int) -> None:
    now = [100.0]
    tier = DiskTier(tmp_path / "kv", 1 << 20, IDENTITY, SIZE, clock=lambda: now[0])
    with file_limit(room):
        stored = [tier.put(key(i), block(i)) for i in range(3)]
        assert stored == [i < (room - 40) // 160 for i in range(3)]
    assert not tier.put(key(3), block(3)), "it is let be for a while"
    now[0] += 10.0
    assert tier.put(key(3), block(3))
    assert found(tier) == [*stored, True, False]
    tier.close()
    assert found(disk(tmp_path)) == [*stored, True, False]


@pytest.mark.parametrize("what", [".", "*", "*/*"])
def test_a_folder_that_was_removed_is_made_again(tmp_path: Path, what: str) -> None:
    tier = disk(tmp_path)
    assert tier.put(key(0), block(0))
    for path in [tmp_path / "kv"] if what == "." else (tmp_path / "kv").glob(what):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert found(tier, 1) == [False]
    assert tier.put(key(0), block(0))
    assert found(tier, 1) == found(disk(tmp_path), 1) == [True]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")))


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, two = disk(tmp_path), disk(tmp_path)
    assert one.put(key(0), block(0))
    assert two.put(key(1), block(1))
    for tier in (one, two):
        tier.refresh()
        assert found(tier, 2) == [True, True]
    assert not two.put(key(0), block(0)), "it is there"
    assert one.put(key(2), block(2))
    two.refresh()
    assert found(two, 3) == [True, True, True]


def test_a_process_never_removes_what_another_one_writes_to(tmp_path: Path) -> None:
    limit = 64 * (HEADER_BYTES + SIZE)
    one, two = disk(tmp_path, limit), disk(tmp_path, limit)
    assert one.put(key(0), block(0))
    for i in range(1, 200):
        two.put(key(i), block(i))
    assert one.put(key(500), block(500))
    assert (one.get(key(0)), one.get(key(500))) == (block(0), block(500))
    assert two.get(key(1)) is None, "what it had written itself, long ago, is gone"


def test_a_segment_that_another_process_removed_is_a_miss(tmp_path: Path) -> None:
    path = filled(tmp_path)
    tier = disk(tmp_path)
    path.unlink()
    assert found(tier) == [False] * 5
    assert len(tier) == 0


WRITER = """
import sys
from pathlib import Path
from test_tier import disk, key, block
tier = disk(Path(sys.argv[1]))
for i in range(100_000):
    tier.put(key(i), block(i))
    print(i, flush=True)
"""


@pytest.mark.parametrize("count", [1, 2, 17])
def test_what_was_stored_before_a_kill_is_there(tmp_path: Path, count: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        assert process.stdout is not None
        for _ in range(count):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    there = found(disk(tmp_path), count + 5)
    assert all(there[:count])


def test_host_memory_keeps_what_was_used_last_within_its_bytes() -> None:
    tier = HostTier(3 * SIZE)
    for i in range(3):
        assert tier.put(key(i), block(i))
    assert tier.get(key(0)) == block(0)
    assert tier.put(key(3), block(3))
    assert [tier.has(key(i)) for i in range(4)] == [True, False, True, True]
    assert tier.num_bytes == 3 * SIZE
    assert not tier.put(key(4), bytes(4 * SIZE))
    assert tier.get(key(1)) is None


def test_a_load_brings_blocks_in_order_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    keeper = BlockKeeper(HostTier(SIZE), disk(tmp_path))
    for i in (0, 1, 3):
        assert keeper.wants(key(i), SIZE)
        keeper.store(key(i), block(i))
    assert keeper.settle()
    assert keeper.num_held([key(i) for i in range(4)]) == 2
    keeper.load(5, [key(i) for i in range(4)])
    assert keeper.settle()
    assert keeper.take(9) == [(5, 0, block(0)), (5, 1, block(1)), (5, 4, None)]
    assert not keeper.wants(key(3), SIZE)
    keeper.close()
    keeper.close()


def test_blocks_beyond_what_may_wait_are_not_stored(tmp_path: Path) -> None:
    keeper = BlockKeeper(None, disk(tmp_path), pending_bytes=SIZE)
    assert not keeper.wants(key(0), SIZE + 1)
    keeper.store(key(0), block(0))
    keeper.close()
    assert found(disk(tmp_path), 1) == [True], "what waited is stored at the end"
