"""Digests change with any byte of what they cover, and with nothing else."""

from __future__ import annotations

from pathlib import Path

from headway.fingerprint import DIGITS, file_digest, source_digest


def test_a_source_digest_changes_with_content_and_names_of_python_files_alone(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "one.py").write_text("a = 1\n")
    first = source_digest(tmp_path)
    assert len(first) == DIGITS
    (tmp_path / "pkg" / "note.txt").write_text("x")
    (tmp_path / "pkg" / "__pycache__").mkdir()
    (tmp_path / "pkg" / "__pycache__" / "one.pyc").write_text("x")
    assert source_digest(tmp_path) == first
    (tmp_path / "pkg" / "one.py").write_text("a = 2\n")
    second = source_digest(tmp_path)
    (tmp_path / "pkg" / "one.py").rename(tmp_path / "pkg" / "two.py")
    assert len({first, second, source_digest(tmp_path)}) == 3


def test_the_default_is_the_tree_that_runs() -> None:
    import headway

    assert source_digest() == source_digest(Path(headway.__file__).parent)


def test_a_file_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"abc")
    assert file_digest(path) == "ba7816bf8f01cfea"
