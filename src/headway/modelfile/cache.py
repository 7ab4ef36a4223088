"""Converted models on disk, keyed by the digest of what they were made from.

    root/<key>                      an entry: a file or a folder, whole or absent
    root/<…>/.new-<random>/         one being written beside its place, locked by its writer
    root/<digest>/name              what the model is called, for lists

An entry appears by one rename, so a writer killed at any moment leaves nothing that could be taken for an entry, and
of two writers of the same entry both succeed and one copy stays. An entry that was returned is in use, by a lock on it,
until the `ModelCache` is gone; one that is not may be removed to keep to a size. Refuses to know what the entries mean.
The folder is given by the caller; no environment is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from headway.errors import ConfigError

log = logging.getLogger(__name__)

_DIGESTS = "digests"
HUB = "hub"  # models as they were fetched, see `pull`
_NEW = ".new-"
_NAME = "name"
_FETCHED = ".gguf"  # came from elsewhere, and is not made anew here
_KEY = re.compile(r"\w[\w.-]{0,127}(/\w[\w.-]{0,127})?", re.ASCII)
_SETTLED_S = 2.0  # a file changed more recently than this may change again within one tick of its clock


def default_root() -> Path:
    """Where converted models are kept unless the user says otherwise."""
    return Path.home() / ".cache" / "headway"


def file_digest(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Removed(NamedTuple):
    """An entry that was removed to keep to a size; `model` is what its model is called."""

    model: str
    num_bytes: int


class ModelCache:
    """What `entry` returns is complete: entries become visible by one rename and are never changed after it.

    A key is a digest, or a digest and a name with a slash between: `<digest>/tokenizer.json`. With `limit_bytes`, what
    was not used for longest makes room when something is published.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self._limit_bytes = limit_bytes
        self._held: dict[Path, int] = {}  # entries in use, by the descriptor that holds the lock
        weakref.finalize(self, _close_all, self._held)

    def entry(self, key: str) -> Path | None:
        """The entry, if it is there; in use from now on."""
        path = self._path(key)
        if not path.exists() or not self._hold(key, path):
            return None
        for used in (path, path.parent):
            with contextlib.suppress(OSError):  # a cache that cannot be written to is still of use
                os.utime(used)
        return path

    def publish(self, key: str, write: Callable[[Path], None]) -> Path:
        """The entry; if it is not there `write` makes it, leaving a file or a folder at the path it is given."""
        target = self._path(key)
        if target.exists() and self._hold(key, target):
            return target
        home = target.parent
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(home)
            with _scratch(home) as scratch:
                draft = scratch / target.name
                write(draft)
                _flush(draft)
                _rename(draft, target)
            _flush_folder(home)
        except OSError as error:
            raise ConfigError(
                f"cannot write the model cache {self.root}: {error}; free some space or name another folder "
                "with --cache-dir"
            ) from error
        if (replaced := self._held.pop(target, None)) is not None:  # it was found damaged and removed
            os.close(replaced)
        self._hold(key, target)
        if self._limit_bytes is not None and _counts(target):
            for model, num_bytes in self.prune(self._limit_bytes):
                log.info(
                    "removed a conversion of %s (%.2f GB), not used for longest: conversions may take %g GB "
                    "(--cache-limit-gb)",
                    *(model, num_bytes / 1e9, self._limit_bytes / 1e9),
                )
        return target

    def prune(self, limit_bytes: int) -> list[Removed]:
        """Remove conversions, not used for longest first, until the rest takes no more; those in use stay."""
        conversions = [(path.stat().st_mtime, size_of(path), path) for _, path in self.entries() if _counts(path)]
        left = sum(size for _, size, _ in conversions)
        removed = []
        for _, size, path in sorted(conversions):
            if left <= limit_bytes:
                break
            name = self.name(path.parent.name)
            if _remove_unused(path):
                removed.append(Removed(name, size))
                left -= size
        return removed

    def note_name(self, digest: str, name: str) -> None:
        """Remember what the model of a digest is called, for lists."""
        if not self._path(f"{digest}/{_NAME}").exists():
            # As with digests: not worth an error.
            with contextlib.suppress(ConfigError):
                self.publish(f"{digest}/{_NAME}", lambda draft: _write_text(draft, name))

    def name(self, digest: str) -> str:
        """What that model is called, as far as is known."""
        try:
            return (self.root / digest / _NAME).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return digest[:12]

    def _hold(self, key: str, path: Path) -> bool:
        """Mark an entry as in use; False: it is being removed."""
        if path in self._held or not _counts(path) or key.startswith(_DIGESTS):
            return True
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        try:
            is_there = os.path.samestat(os.fstat(handle), path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there or self._held.setdefault(path, handle) != handle:  # or another thread was first
            os.close(handle)
        return is_there

    def digest(self, path: Path) -> str:
        """sha256 of a file, remembered while its place, size and time of change stay the same: models are large."""
        stat = path.stat()
        identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\0{stat.st_dev}"
        name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        found = self.entry(f"{_DIGESTS}/{name}")
        if found is not None:
            known = found.read_text("ascii", "replace").strip()
            if len(known) == 64:
                return known
        digest = file_digest(path)
        if time.time() - stat.st_mtime > _SETTLED_S and path.stat().st_mtime_ns == stat.st_mtime_ns:
            # Remembering is a convenience: on a read-only or full disk the digest is still right.
            with contextlib.suppress(ConfigError):
                self.publish(f"{_DIGESTS}/{name}", lambda draft: _write_text(draft, digest))
        return digest

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Every (key, path) there is, in order of the keys."""
        for path in sorted(self.root.glob("*/*")):
            if path.parent.name not in (_DIGESTS, HUB) and path.name != _NAME and not path.name.startswith(_NEW):
                yield f"{path.parent.name}/{path.name}", path

    def used(self, digest: str) -> float:
        """When an entry of this digest was last looked up or written, in seconds since 1970."""
        return self._path(digest).stat().st_mtime

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.root / key


def size_of(path: Path) -> int:
    """Bytes of a file, or of all that is in a folder."""
    return sum(inner.stat().st_size for inner in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _counts(path: Path) -> bool:
    """Whether an entry was made here and can be made again."""
    return path.suffix.lower() != _FETCHED and path.name != _NAME


def _close_all(held: dict[Path, int]) -> None:
    for handle in held.values():
        os.close(handle)
    held.clear()


def _remove_unused(path: Path) -> bool:
    """Remove an entry unless a process holds it; of a model of which nothing is left, the folder too."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):
        if [inner.name for inner in path.parent.iterdir()] == [_NAME]:
            shutil.rmtree(path.parent)
    return True


def _sweep(home: Path) -> None:
    """Remove what killed writers left: a living one holds the lock of its folder."""
    for left in home.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """A folder of our own beside the entry, locked until we are done or dead."""
    while True:
        folder = home / f"{_NEW}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another writer swept it before it was open, or below before it was locked: take another
        fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists():
            break
        os.close(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _rename(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError as error:
        # A folder does not replace a folder: another writer published the same content first.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.exists():
            raise


def _flush(path: Path) -> None:
    """Force the content to disk before the rename that publishes it."""
    if path.is_dir():
        for inner in path.iterdir():
            _flush(inner)
        _flush_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
