"""Options every test folder shares. Fixtures live beside the tests that use them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine: a cold one needs a second for its first character.
settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headway")

# A shell without job control starts what runs in the background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Whatever headway may import anywhere; hypothesis and pytest themselves must stay importable.
THIRD_PARTY = frozenset(
    {
        *("torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "starlette", "uvicorn", "uvloop"),
        *("httptools", "prometheus_client", "cyclopts", "transformers", "gguf", "openai"),
    }
)


class ThirdPartyBlock:
    """A finder that refuses every third-party import, to prove that a package needs none."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in THIRD_PARTY:
            raise ModuleNotFoundError(f"{name} is blocked by --stdlib-only", name=name)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stdlib-only", action="store_true", help="refuse torch and every other third-party import")
    parser.addoption("--policy", action="append", default=[], help="my.module:Thing, for the conformance suite too")
    parser.addoption("--mutants-seed", type=int, default=0, help="another sample of the seeded bugs")
    parser.addoption("--schema-cases", type=int, default=200, help="requests made from the OpenAPI document per route")
    parser.addoption("--record-plans", action="store_true", help="record the plans of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stdlib-only"):
        loaded = THIRD_PARTY & sys.modules.keys()
        if loaded:
            raise pytest.UsageError(f"--stdlib-only comes too late, already imported: {', '.join(sorted(loaded))}")
        sys.meta_path.insert(0, ThirdPartyBlock())
