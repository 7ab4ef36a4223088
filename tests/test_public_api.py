"""Four names are public, and importing the package costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import headway
from headway.about import __version__
from headway.config import EngineConfig
from headway.errors import EngineError
from headway.values.params import SamplingParams


def test_exactly_four_names_are_exported() -> None:
    assert sorted(headway.__all__) == ["EngineConfig", "EngineError", "LLM", "SamplingParams"]
    assert set(dir(headway)) == set(headway.__all__)


def test_names_are_the_real_things() -> None:
    assert headway.EngineConfig is EngineConfig
    assert headway.SamplingParams is SamplingParams
    assert headway.EngineError is EngineError
    assert isinstance(headway.LLM, type)


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Engine'; it exports LLM"):
        _ = headway.Engine


def test_importing_the_package_and_its_values_needs_no_third_party_package() -> None:
    code = (
        "import sys, headway; from headway import SamplingParams, EngineConfig, EngineError; "
        "print(sorted({'torch', 'numpy', 'msgspec', 'cyclopts', 'starlette', 'tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_offline_use_needs_no_server_package() -> None:
    code = (
        "import sys; from headway import LLM; "
        "print(sorted({'msgspec', 'cyclopts', 'starlette', 'uvicorn', 'rich', 'prometheus_client', 'transformers'} "
        "& sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_distribution() -> None:
    assert headway.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
