"""`doctor` and `models` on the real machine, with a cache of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.config import DEFAULT_MODEL, DTYPES, KV_DTYPES
from headway.fingerprint import DIGITS, source_digest


def test_doctor_says_what_will_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--cache-dir", str(tmp_path / "new")], {}) == 0
    report = json.loads(capsys.readouterr().out)
    assert int(report["machine"]["usable cores"]) >= 1
    assert report["models"]["cache"] == f"{tmp_path / 'new'} (made on first use)"
    assert DEFAULT_MODEL in report["models"]
    assert report["will use"]["dtype"] in DTYPES[1:]
    assert report["will use"]["kv dtype"] in KV_DTYPES[1:]
    assert report["will use"]["source digest"] == source_digest()
    kernels = report["will use"]["kernels"]
    assert (len(report["will use"]["kernels digest"]) == DIGITS) == kernels.startswith("native-")
    assert kernels.startswith("native-") or "scripts/build-kernels" in kernels
    assert (report["will use"]["decoder"] == "native") == kernels.startswith("native-")
    assert not (tmp_path / "new").exists()


def test_doctor_is_readable_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"], {"HEADWAY_CACHE_DIR": str(tmp_path)}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["machine", "installed", "models", "will use"]
    assert any(line.split() == ["cache", str(tmp_path)] for line in lines)


def test_models_lists_the_bundled_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "--cache-dir", str(tmp_path)], {}) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATE", "SIZE", "CONVERTED", "LAST", "USED"]
    assert rows[0].split()[0] == DEFAULT_MODEL
    assert "MiB" in rows[0]
