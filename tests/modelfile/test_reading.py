"""What is seen while weights are read: a bar on a terminal, lines in a log."""

from __future__ import annotations

import builtins
import io
import logging
import sys

import pytest

from headway.modelfile.reading import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read() -> None:
    with shown("weights") as report:
        for done in (3, 4, 40, 41, 99, 100):
            report(done, 100)


def test_a_log_has_a_line_for_every_tenth_at_most(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read()
    assert caplog.messages == ["weights: 40 %", "weights: 90 %", "weights: 100 %"]


def test_a_terminal_has_a_bar_and_no_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level(logging.INFO):
        read()
    assert "weights" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert not caplog.messages
    assert capsys.readouterr().out == ""


def test_a_terminal_without_rich_has_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    find = builtins.__import__

    def refuse(name: str, *more: object) -> object:
        if name.startswith("rich"):
            raise ImportError(name)
        return find(name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO):
        read()
    assert caplog.messages[-1] == "weights: 100 %"
