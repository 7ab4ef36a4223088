"""The cache holds whole entries or none, though writers die or race."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.modelfile.cache import ModelCache, file_digest

# A writer that says how far it is and then hangs until it is killed.
WRITER = """
import sys
from pathlib import Path
from headway.modelfile.cache import ModelCache

def hang():
    print("here", flush=True)
    sys.stdin.read()

def write(draft):
    if where == "folder":
        draft.mkdir()
        (draft / "one").write_bytes(b"x" * 100_000)
        hang()
    with draft.open("wb") as file:
        if where == "start":
            hang()
        file.write(b"x" * 100_000)
        file.flush()
        if where == "middle":
            hang()
    if where == "end":
        hang()

where = sys.argv[1]
ModelCache(Path(sys.argv[2])).publish("key/entry", write)
"""


def left_over(root: Path) -> list[Path]:
    return list(root.glob("**/.new-*"))


@pytest.mark.parametrize("where", ["start", "middle", "end", "folder"])
def test_a_killed_writer_leaves_no_entry_and_the_next_one_succeeds(tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-c", WRITER, where, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        cache = ModelCache(tmp_path)
        assert cache.entry("key/entry") is None
        assert len(left_over(tmp_path)) == 1
        child.kill()
    assert cache.entry("key/entry") is None
    path = cache.publish("key/entry", lambda draft: draft.write_bytes(b"whole") and None)
    assert path.read_bytes() == b"whole"
    assert left_over(tmp_path) == []


def test_a_living_writer_is_not_swept_away(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, "middle", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"here\n"
        ModelCache(tmp_path).publish("key/other", lambda draft: draft.write_bytes(b"1") and None)
        child.stdin.close()
        assert child.wait() == 0
    found = ModelCache(tmp_path).entry("key/entry")
    assert found is not None
    assert found.stat().st_size == 100_000


@pytest.mark.parametrize("is_folder", [False, True])
def test_concurrent_writers_all_succeed_and_one_copy_stays(tmp_path: Path, is_folder: bool) -> None:
    cache = ModelCache(tmp_path)
    together = threading.Barrier(4)
    results: list[Path] = []

    def write(draft: Path) -> None:
        if is_folder:
            draft.mkdir()
        target = draft / "inner" if is_folder else draft
        target.write_bytes(b"same")
        together.wait(timeout=30)

    threads = [threading.Thread(target=lambda: results.append(cache.publish("key/x", write))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "key" / "x"] * 4
    target = tmp_path / "key" / "x"
    assert (target / "inner" if is_folder else target).read_bytes() == b"same"
    assert left_over(tmp_path) == []


def test_an_entry_is_written_once(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    cache.publish("key", lambda draft: draft.write_bytes(b"first") and None)
    path = cache.publish("key", lambda draft: draft.write_bytes(b"second") and None)
    assert path.read_bytes() == b"first"
    assert cache.entry("key") == path


def test_a_failing_writer_leaves_nothing_and_its_error_passes(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise ValueError("no")

    cache = ModelCache(tmp_path)
    with pytest.raises(ValueError, match="no"):
        cache.publish("key/x", write)
    assert cache.entry("key/x") is None
    assert left_over(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file.*--cache-dir"):
        ModelCache(root).publish("key/x", lambda draft: None)


def test_digest_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache")
    path = tmp_path / "model"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    first = cache.digest(path)
    assert first == file_digest(path)
    memory = next((tmp_path / "cache" / "digests").iterdir())
    memory.write_text("f" * 64)
    assert cache.digest(path) == "f" * 64
    path.write_bytes(b"two")
    os.utime(path, (2000, 2000))
    assert cache.digest(path) == file_digest(path) != first


def test_digest_of_a_file_still_being_changed_is_not_remembered(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache")
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert cache.digest(path) == file_digest(path)
    assert cache.entry("digests") is None


def test_digest_works_where_nothing_can_be_written(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"")
    path = tmp_path / "model"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    assert ModelCache(root).digest(path) == file_digest(path)


def test_entries_are_listed_without_drafts_and_digests(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    for key in ("b/two", "a/one", "digests/x"):
        cache.publish(key, lambda draft: draft.write_bytes(b"1") and None)
    (tmp_path / "a" / ".new-dead").mkdir()
    assert [key for key, _ in cache.entries()] == ["a/one", "b/two"]


HOLDER = """
import sys
from pathlib import Path
from headway.modelfile.cache import ModelCache
cache = ModelCache(Path(sys.argv[1]))
assert cache.entry(sys.argv[2]) is not None
print("here", flush=True)
sys.stdin.read()
"""


def _fill(root: Path, *sizes: int) -> list[Path]:
    """Entries of these sizes, the first not used for longest, each of a model called model0 and so on."""
    cache = ModelCache(root)
    made = []
    for number, size in enumerate(sizes):
        cache.note_name(f"digest{number}", f"model{number}")
        made.append(cache.publish(f"digest{number}/weights", lambda draft, size=size: draft.write_bytes(bytes(size))))  # type: ignore[misc]
        os.utime(made[-1], (1e9 + number, 1e9 + number))
    return made


def test_what_was_not_used_for_longest_makes_room_for_a_new_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = _fill(tmp_path, 4000, 3000, 2000)
    fetched = ModelCache(tmp_path).publish("digest1/model.gguf", lambda draft: draft.write_bytes(bytes(9000)) and None)
    cache = ModelCache(tmp_path, limit_bytes=7000)
    assert cache.entry("digest0/weights") == first, "used again, just now"
    with caplog.at_level("INFO"):
        new = cache.publish("digest3/weights", lambda draft: draft.write_bytes(bytes(1000)) and None)
    assert [path.exists() for path in (first, second, third, new)] == [True, False, True, True]
    (said,) = caplog.messages
    assert said.startswith("removed a conversion of model1 (0.00 GB)")
    assert "--cache-limit-gb" in said
    assert fetched.exists(), "it was not made here"
    assert (tmp_path / "digest1" / "name").exists()


def test_a_model_of_which_nothing_is_left_leaves_no_folder(tmp_path: Path) -> None:
    _fill(tmp_path, 10, 10)
    assert [removed.model for removed in ModelCache(tmp_path).prune(10)] == ["model0"]
    assert [path.name for path in tmp_path.iterdir()] == ["digest1"]


def test_an_entry_that_is_in_use_is_never_removed(tmp_path: Path) -> None:
    first, _ = _fill(tmp_path, 4000, 3000)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "digest0/weights"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert [removed.model for removed in ModelCache(tmp_path).prune(0)] == ["model1"]
        assert first.exists()
        child.kill()
    cache = ModelCache(tmp_path)
    assert cache.entry("digest0/weights") == first
    assert cache.prune(0) == [], "this very process uses it"
    del cache
    assert [removed.model for removed in ModelCache(tmp_path).prune(0)] == ["model0"]


def test_an_entry_that_is_removed_while_it_is_looked_up_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = _fill(tmp_path, 10)
    lock = fcntl.flock

    def lock_late(handle: int, operation: int) -> None:
        path.unlink()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert ModelCache(tmp_path).entry("digest0/weights") is None
