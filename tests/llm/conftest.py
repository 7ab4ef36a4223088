"""A tiny model directory for every module here that says nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_dir import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder
