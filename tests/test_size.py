"""Files and functions stay small enough to read, and the config tree small enough to know."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass

import pytest

from headway.config import ServeConfig
from source_tree import Source, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CORE_LINES = 3_531  # core, values and kv together: nothing is gained by moving a file from one to another
MAX_CONTROL_LINES = 700
MAX_CONFIG_FIELDS = 97  # last came speculation (3), adapters and their memory (2): no other field names a directory


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


@pytest.mark.parametrize(
    ("packages", "limit"),
    [(frozenset({"core", "values", "kv"}), MAX_CORE_LINES), (frozenset({"control"}), MAX_CONTROL_LINES)],
    ids=["core", "control"],
)
def test_pure_packages_can_be_read_in_an_hour(packages: frozenset[str], limit: int) -> None:
    sizes = {s.name: len(s.text.splitlines()) for s in sources() if s.within(packages)}
    assert sizes
    assert sum(sizes.values()) <= limit, sizes


def count_fields(kind: type) -> int:
    assert is_dataclass(kind)
    defaults = kind()
    values = [getattr(defaults, field.name) for field in fields(kind)]
    return sum(count_fields(type(value)) if is_dataclass(value) else 1 for value in values)


def test_config_tree_stays_small() -> None:
    assert count_fields(ServeConfig) <= MAX_CONFIG_FIELDS
