"""Which kernel set a name gives, and what is said where the fast one is missing."""

from __future__ import annotations

import logging

import pytest

from headway.errors import ConfigError
from headway.kernels import native, ref, select


def nothing(threads: int, dtype: str = "float32") -> None:
    """A machine without the library."""


def test_ref_is_always_there() -> None:
    assert select.load("ref", 1).name == "ref"


def test_auto_takes_what_is_installed() -> None:
    found = native.load(1)
    assert select.load("auto", 1).layout == (ref.load() if found is None else found).layout


def test_auto_without_the_library_warns_once_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "load", nothing)
    with caplog.at_level(logging.WARNING):
        assert select.load("auto", 1).name == "ref"
    assert len(caplog.records) == 1
    assert "scripts/build-kernels" in caplog.text


def test_native_without_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", nothing)
    with pytest.raises(ConfigError, match="build-kernels"):
        select.load("native", 1)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, native, ref"):
        select.load("cuda", 1)
