"""The package's source as syntax trees, for tests that check its shape. Knows nothing of what the code does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "headway"


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    name: str  # dotted module name, `headway.` left off; "" for the package itself
    text: str
    tree: ast.Module

    def within(self, packages: frozenset[str]) -> bool:
        """Whether this module is one of `packages` or inside one."""
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)


def sources(root: Path = SRC) -> list[Source]:
    return [parse(path, root) for path in sorted(root.rglob("*.py"))]


def parse(path: Path, root: Path = SRC) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text()
    return Source(path, name, text, ast.parse(text, filename=str(path)))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every imported module as (line, dotted name), wherever in the file the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            assert node.module is not None
            yield node.lineno, node.module
