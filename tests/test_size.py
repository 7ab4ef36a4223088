"""Files and functions stay small enough to read, and the config tree small enough to know."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass

import pytest

from headway.config import ServeConfig
from source_tree import Source, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CORE_LINES = 1_900
MAX_LINES_BESIDE_CORE = {"kv": 250, "values": 450, "control": 700}  # as pure as core, and read when they are needed
MAX_CONFIG_FIELDS = 45


def long_functions(source: Source) -> list[str]:
    return [
        f"{source.path.name}:{node.lineno} {node.name} has {length} lines"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name or "headway")
def test_file_and_its_functions_are_short(source: Source) -> None:
    num_lines = len(source.text.splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{source.path} has {num_lines} lines"
    assert long_functions(source) == []


def test_core_can_be_read_in_an_hour() -> None:
    sizes = {s.name: len(s.text.splitlines()) for s in sources() if s.within(frozenset({"core"}))}
    assert sum(sizes.values()) <= MAX_CORE_LINES, sizes


@pytest.mark.parametrize("package", MAX_LINES_BESIDE_CORE)
def test_what_lies_beside_core_stays_small(package: str) -> None:
    sizes = {s.name: len(s.text.splitlines()) for s in sources() if s.within(frozenset({package}))}
    assert sizes
    assert sum(sizes.values()) <= MAX_LINES_BESIDE_CORE[package], sizes


def count_fields(kind: type) -> int:
    assert is_dataclass(kind)
    defaults = kind()
    values = [getattr(defaults, field.name) for field in fields(kind)]
    return sum(count_fields(type(value)) if is_dataclass(value) else 1 for value in values)


def test_config_tree_stays_small() -> None:
    assert count_fields(ServeConfig) <= MAX_CONFIG_FIELDS
