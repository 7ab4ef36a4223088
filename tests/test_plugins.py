"""A plug-in is a file; its name is the file's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway import plugins
from headway.errors import ConfigError
from headway.policies import fcfs


def test_names_are_file_names() -> None:
    assert "fcfs" in plugins.names("policies")
    assert plugins.names("policies") == sorted(plugins.names("policies"))


def test_load_finds_ours_and_others() -> None:
    assert plugins.load("policies", "fcfs") is fcfs.PLUGIN
    assert plugins.load("policies", "collections:OrderedDict").__name__ == "OrderedDict"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fcsf", r"no policies named 'fcsf'; allowed: .*fcfs.*, or my.module:Thing"),
        ("../errors", r"no policies named"),
        ("no.such.module:Thing", r"cannot import 'no.such.module'"),
        ("collections:Nothing", r"module 'collections' has no 'Nothing'"),
        (":Thing", r"cannot import ''"),
    ],
)
def test_unknown_name_says_what_is_allowed(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plugins.load("policies", name)


def test_file_without_plugin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"headway.core.request has no PLUGIN"):
        plugins.load("core", "request")


def test_a_module_in_the_current_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_made_here.py").write_text("class Thing:\n    pass\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert plugins.load("policies", "policy_made_here:Thing").__name__ == "Thing"
    sys.modules.pop("policy_made_here")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def f(:\n", r"SyntaxError: invalid syntax \(faulty.py, line 1\)"),
        ("x = 1\nraise RuntimeError('boom')\n", r"RuntimeError: boom \(faulty.py, line 2\)"),
    ],
)
def test_a_fault_in_code_from_outside_is_one_sentence_with_its_line(
    code: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    with pytest.raises(ConfigError, match=rf"cannot import 'faulty' for policies 'faulty:Thing': {sentence}"):
        plugins.load("policies", "faulty:Thing")
