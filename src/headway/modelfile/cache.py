"""Converted models on disk, keyed by the digest of what they were made from.

    root/<key>                      an entry: a file or a folder, whole or absent
    root/<…>/.new-<random>/         one being written beside its place, locked by its writer

An entry appears by one rename, so a writer killed at any moment leaves nothing that could be taken for an entry, and
of two writers of the same entry both succeed and one copy stays. Refuses to know what the entries mean. The folder
is given by the caller; no environment is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headway.errors import ConfigError

_DIGESTS = "digests"
HUB = "hub"  # models as they were fetched, see `pull`
_NEW = ".new-"
_KEY = re.compile(r"\w[\w.-]{0,127}(/\w[\w.-]{0,127})?", re.ASCII)
_SETTLED_S = 2.0  # a file changed more recently than this may change again within one tick of its clock


def default_root() -> Path:
    """Where converted models are kept unless the user says otherwise."""
    return Path.home() / ".cache" / "headway"


def file_digest(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ModelCache:
    """What `entry` returns is complete: entries become visible by one rename and are never changed after it.

    A key is a digest, or a digest and a name with a slash between: `<digest>/tokenizer.json`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, key: str) -> Path | None:
        """The entry, if it is there."""
        path = self._path(key)
        if not path.exists():
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written to is still of use
            os.utime(path.parent)
        return path

    def publish(self, key: str, write: Callable[[Path], None]) -> Path:
        """The entry; if it is not there `write` makes it, leaving a file or a folder at the path it is given."""
        target = self._path(key)
        if target.exists():
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
        return target

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
            if path.parent.name not in (_DIGESTS, HUB) and not path.name.startswith(_NEW):
                yield f"{path.parent.name}/{path.name}", path

    def used(self, digest: str) -> float:
        """When an entry of this digest was last looked up or written, in seconds since 1970."""
        return self._path(digest).stat().st_mtime

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.root / key


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
    path.write_text(text, "ascii")
