"""Which kernel set a name gives, and what is said where the fast one is missing."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace

import pytest

from headway.config import KERNELS
from headway.errors import ConfigError
from headway.fingerprint import file_digest
from headway.kernels import library, native, ref, select
from headway.kernels.ops import KernelSet


def nothing(threads: int, level: str = "auto", dtype: str = "float32") -> None:
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
        found = select.load("auto", 1)
    assert (found.name, found.digest) == ("ref", "")
    assert found.fallback == "the native kernels are not installed"
    assert len(caplog.records) == 1
    assert "scripts/build-kernels" in caplog.text


@pytest.mark.parametrize(
    ("machine", "reason"),
    [("x86_64", "this processor has no AVX2"), ("arm64", "there are no vector kernels for arm64")],
)
def test_auto_at_the_level_for_any_machine_warns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, reason: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)

    def plain(threads: int, level: str = "auto", dtype: str = "float32") -> KernelSet:
        return replace(ref.load(), name="native-generic")

    monkeypatch.setattr(native, "load", plain)
    with caplog.at_level(logging.WARNING):
        assert select.load("auto", 1).fallback == reason
        assert select.load("native-generic", 1).fallback == "", "it was asked for"
    assert len(caplog.records) == 1
    assert "level generic" in caplog.text


def test_a_native_set_bears_the_digest_of_its_library(caplog: pytest.LogCaptureFixture) -> None:
    path, found = library.find_library(), select.load("auto", 1)
    if path is not None:
        assert (found.digest, found.fallback) == (file_digest(path), "")
        assert not caplog.records


@pytest.mark.parametrize("name", ["native", "native-avx2"])
def test_native_without_the_library_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", nothing)
    with pytest.raises(ConfigError, match="build-kernels"):
        select.load(name, 1)


def test_ref_does_without_a_library_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale() -> str:
        raise ConfigError("kernel library has another interface")

    monkeypatch.setattr(library, "cpu_level", stale)
    assert library.chosen_level("ref") == "none"
    with pytest.raises(ConfigError, match="another interface"):
        library.chosen_level("auto")


def test_a_level_can_be_chosen_by_name_and_decides_the_number_format() -> None:
    if native.load(1) is None:
        assert library.chosen_level("native-generic") == "none"
        return
    assert select.load("native-generic", 1).name == "native-generic"
    assert library.chosen_level("native-generic") == "generic"
    assert library.chosen_level("native") == library.chosen_level("auto") == library.cpu_level()
    assert library.chosen_level("ref") == "none"
    assert select.NAMES == KERNELS


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, native, ref"):
        select.load("cuda", 1)
