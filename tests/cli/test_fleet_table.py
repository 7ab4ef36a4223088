"""`headway fleet` as its users see it."""

from __future__ import annotations

import pytest

from headway.cli import fleet as command

ROW = {
    "name": "gpu-machine-with-a-long-name-0",
    "where": "some.very.long.host.name.of.a.machine.example.internal:45678",
    "role": "prefill",
    "health": "up",
    "requests": 12,
    "prefill_tokens": 123456,
    "cached_blocks": 12345,
    "num_blocks": 23456,
    "restarts": 3,
    "pid": 1234567,
}


def test_nothing_is_cut_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(command, "ask", lambda *args, **more: [ROW])
    assert command.fleet(admin_socket="unused") == 0
    title, line = capsys.readouterr().out.splitlines()
    assert line.split() == [
        *(ROW["name"], ROW["where"], "prefill", "up", "12", "123456", "12345", "of", "23456", "3", "1234567")
    ]
    assert title.split() == [
        *("name", "where", "role", "health", "requests", "prefill", "tokens", "cached", "blocks", "restarts", "pid")
    ]
