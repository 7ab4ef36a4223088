"""Blocks on disk: append-only segment files that outlive the process, found by what they hold.

    FOLDER/<digest of the identity>/<writer>.kv       file:  magic 8 | identity 32 | record, record, record ...

A record is `record`'s header and a block. A process appends to a file of its own and reads those of all: several may
share a folder. What was half written when a process was killed has no sound header, or data of another checksum: it is
not there. The identity names model, numbers and layout, so no other engine looks into the same files. Files are
removed whole, the one not used for longest first (its time of modification), never one that a process writes to.
Every error of the disk is a miss. One thread uses it; others may ask `has`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headway.engine.tier.record import HEADER_BYTES, KEY_BYTES, Buffer, checksum, is_whole, pack_header, unpack_header
from headway.errors import ConfigError

log = logging.getLogger(__name__)

_MAGIC = b"headwkv1"
_START = len(_MAGIC) + KEY_BYTES
_SEGMENT_BYTES = 64 << 20  # of one file, at most; with a small limit an eighth of that
_PAUSE_S = 5.0  # before a disk that failed is written to again
_COUNT_S = 0.2  # at most so often all files are counted, since other processes write too
_TOUCH_S = 1.0  # at most so often a file's time of use is renewed


class _StoredAt(NamedTuple):
    segment: Path
    offset: int  # of the header


@dataclass(slots=True)
class _Writing:
    """The file that this process appends to, and its end."""

    path: Path
    fd: int
    end: int


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can look into, or check that it is one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"kv_disk_dir is {str(folder)!r}, which cannot be made: {error.strerror}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"kv_disk_dir is {str(folder)!r}, which other users can look into; it will hold what prompts were made of: "
            "give a folder of your own, or chmod 700 this one"
        )
    return folder


class DiskTier:
    """What `has` says is there was read with a sound header; `get` still verifies every byte."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        identity: bytes,
        block_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert len(identity) == KEY_BYTES
        self._root = private_folder(folder)
        self._folder = private_folder(folder / identity.hex()[:32])
        self._limit_bytes = limit_bytes
        self._identity = identity
        self._block_bytes = block_bytes
        self._segment_bytes = max(HEADER_BYTES + block_bytes + _START, min(_SEGMENT_BYTES, limit_bytes // 8))
        self._clock = clock
        self._places: dict[bytes, _StoredAt] = {}
        self._scanned: dict[Path, int] = {}  # file -> up to where its records are known
        self._touched: dict[Path, float] = {}
        self._writing: _Writing | None = None
        self._paused_until = self._counted = 0.0
        self._total = limit_bytes  # bytes of all files when they were last counted, and what was written since
        self.num_corrupt = 0  # blocks whose data was not what was written
        self.refresh()

    def has(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    # Reading.

    def get(self, key: bytes) -> bytes | None:
        """A block as it was put; None: it is not there, or not whole."""
        place = self._places.get(key)
        if place is None:
            return None
        try:
            with open(_open(place.segment, os.O_RDONLY), "rb", buffering=0) as file:
                raw = os.pread(file.fileno(), HEADER_BYTES + self._block_bytes, place.offset)
        except OSError:
            if self._writing is not None and place.segment == self._writing.path:
                self._end_segment()  # what is written to it is never found
            self._drop(place.segment)  # removed by another process, mostly
            return None
        header, data = unpack_header(raw[:HEADER_BYTES]), raw[HEADER_BYTES:]
        if header is None or header.key != key or not is_whole(header, data):
            self.num_corrupt += 1
            log.warning("%s holds a block that is not what was written; it is computed again", place.segment)
            del self._places[key]
            return None
        self._touch(place.segment)
        return data

    def refresh(self) -> None:
        """Learn what other processes have written, and have removed, since the last look."""
        try:
            found = {path for path in self._folder.iterdir() if path.suffix == ".kv"}
        except OSError:
            return
        for path in self._scanned.keys() - found:
            self._drop(path)
        for path in found:
            try:
                self._scan(path)
            except OSError:
                self._drop(path)

    def _scan(self, path: Path) -> None:
        if self._writing is not None and path == self._writing.path:
            return
        at = self._scanned.get(path, 0)
        if path.stat().st_size < at + HEADER_BYTES:
            return
        with open(_open(path, os.O_RDONLY), "rb", buffering=0) as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            if not at:
                at = _START
                if os.pread(fd, _START, 0) != _MAGIC + self._identity:
                    self._scanned[path] = size  # another format, or torn at once: nothing to find
                    return
            while at + HEADER_BYTES + self._block_bytes <= size:
                header = unpack_header(os.pread(fd, HEADER_BYTES, at))
                if header is None or header.num_bytes != self._block_bytes:
                    break  # torn, or being written: what follows is not looked at until this is sound
                self._places.setdefault(header.key, _StoredAt(path, at))
                at += HEADER_BYTES + self._block_bytes
        self._scanned[path] = at

    def _drop(self, path: Path) -> None:
        self._scanned.pop(path, None)
        self._touched.pop(path, None)
        for key in [key for key, place in self._places.items() if place.segment == path]:
            del self._places[key]

    def _touch(self, path: Path) -> None:
        now = self._clock()
        if now - self._touched.get(path, -_TOUCH_S) >= _TOUCH_S:
            self._touched[path] = now
            try:
                os.utime(path)
            except OSError:
                self._drop(path)

    # Writing.

    def put(self, key: bytes, data: Buffer) -> bool:
        """Append a block; False: it is there already, or the disk does not take it."""
        if key in self._places or self._clock() < self._paused_until:
            return False
        assert len(data) == self._block_bytes
        needed = HEADER_BYTES + len(data)
        try:
            self._make_room(_START + needed)  # perhaps it begins a file
            writing = self._writing or self._begin()
            raw = pack_header(key, len(data), checksum(data))
            num_written = os.pwritev(writing.fd, (raw, data), writing.end)
            if num_written != needed:
                raise OSError(28, "the disk is full")
        except OSError as error:
            self._give_up(error)
            return False
        self._places[key] = _StoredAt(writing.path, writing.end)
        writing.end += needed
        if writing.end + needed > self._segment_bytes:
            self._end_segment()
        return True

    def _begin(self) -> _Writing:
        """A file of this process's own, locked while it is written to."""
        for folder in (self._root, self._folder):  # they may have been removed
            folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}.kv"
        fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.pwrite(fd, _MAGIC + self._identity, 0) != _START:
                raise OSError(28, "the disk is full")
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._writing = _Writing(path, fd, _START)
        return self._writing

    def _end_segment(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            self._scanned[writing.path] = writing.end
            os.close(writing.fd)

    def _give_up(self, error: OSError) -> None:
        """Leave no half-written record behind if that can be had, and let the disk be for a while."""
        log.warning("KV blocks are not written to disk for %g s: %s", _PAUSE_S, error)
        self._paused_until = self._clock() + _PAUSE_S
        writing = self._writing
        if writing is not None:
            try:
                os.ftruncate(writing.fd, writing.end)
            except OSError as again:
                log.debug("a half-written record stays: %s", again)  # its checksum is wrong
            self._end_segment()

    def _make_room(self, needed: int) -> None:
        """Remove files until so many bytes more fit; OSError: they do not."""
        now = self._clock()
        self._total += needed
        if self._total <= self._limit_bytes and now < self._counted + _COUNT_S:
            return
        files = sorted(self._files())
        total = sum(size for _, _, size in files)
        self._total, self._counted = total + needed, now
        if total + needed <= self._limit_bytes:
            return
        for _, path, size in files:
            if self._remove(path):
                total -= size
                self._total -= size
                if total + needed <= self._limit_bytes:
                    return
        if self._writing is not None:  # what is left is written to by others, and by this process: it begins anew
            path, size = self._writing.path, self._writing.end
            self._end_segment()
            if self._remove(path) and total - size + needed <= self._limit_bytes:
                self._total -= size
                return
        raise OSError(28, f"{self._limit_bytes} bytes are allowed and other processes have them")

    def _files(self) -> Iterator[tuple[float, Path, int]]:
        """Segments of every identity: when each was used last, and its size."""
        for folder in self._root.iterdir() if self._root.exists() else ():
            if not folder.is_dir() or folder.is_symlink():
                continue
            for path in folder.glob("*.kv"):
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                yield found.st_mtime, path, found.st_size

    def _remove(self, path: Path) -> bool:
        """Remove a file unless a process writes to it."""
        if self._writing is not None and path == self._writing.path:
            return False
        try:
            fd = _open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
        except OSError:
            return False
        self._drop(path)
        return True

    def close(self) -> None:
        self._end_segment()


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
