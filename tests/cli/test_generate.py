"""Reading prompts and small printing helpers of the command line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headway.cli.generate import read_prompts
from headway.cli.main import _stdin_as_file
from headway.cli.terminal import format_bytes, progress, table
from headway.errors import ConfigError


def test_prompts_are_lines_and_empty_lines_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_prompts(str(path)) == ["one", "  two "]
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert read_prompts("-") == ["three"]


def test_jsonl_prompts_may_hold_newlines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\\nb"\n{"prompt": "c", "id": 1}\n')
    assert read_prompts(str(path)) == ["a\nb", "c"]


def test_only_a_newline_ends_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\u2028b"\r\n"c\x85d"\n', encoding="utf-8")  # as `--output jsonl` writes them
    assert read_prompts(str(path)) == ["a\u2028b", "c\x85d"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\x0ctwo\nthree\r\n"))
    assert read_prompts("-") == ["one\x0ctwo", "three"]


@pytest.mark.parametrize("line", ["{", "1", '{"text": "a"}', '{"prompt": 1}'])
def test_broken_jsonl_names_the_prompt(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"ok"\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl, prompt 2 is "):
        read_prompts(str(path))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read prompts"):
        read_prompts(str(path))


def test_lone_dash_is_stdin() -> None:
    assert _stdin_as_file(["generate", "-", "--n", "2"]) == ["generate", "--file=-", "--n", "2"]
    assert _stdin_as_file(["generate", "--file", "-"]) == ["generate", "--file=-"]


def test_table_and_sizes() -> None:
    assert table(["A", "B"], [["long", "x"], ["s", ""]]) == "A     B\nlong  x\ns"
    assert [format_bytes(n) for n in (0, 1023, 1536, 98 * 2**20, 3 * 2**30)] == [
        *("0 B", "1023 B", "1.5 KiB", "98.0 MiB", "3.0 GiB"),
    ]


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("generating", 2) as bar:
        bar.update(1, 10)
        assert capsys.readouterr() == ("", "")
        bar.write("an answer")
    assert capsys.readouterr() == ("an answer\n", "")
