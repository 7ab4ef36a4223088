"""Checks the words of the project against docs/glossary.md: `scripts/lint` runs it, and it exits 1 with what it found.

    identifiers  of `src/`, with metric names and flags: no part of a name is a retired word
    prose        of comments, docstrings, messages and documents: none of the unmistakable retired phrases
    classes      of `src/`: every name is used once

A retired word may mean something else in one place; `ALLOWED` lists these places with the meaning.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTEAD = {
    "seat": "slot",
    "seats": "slots",
    "seated": "admitted",
    "seating": "admission",
    "sits": "is admitted",
    "displace": "preempt",
    "displaces": "preempts",
    "displaced": "preempted",
    "lack": "PreemptReason.MEMORY",
    "resting": "paused",
    "rests": "paused",
    "rested": "paused",
    "doomed": "infeasible",
    "hopeless": "infeasible",
    "door": "SloAdmission",
    "knock": "reject",
    "planned": "num_scheduled",
    "promise": "reserved, or objective",
    "promised": "reserved, or objective",
    "promises": "reserved, or objective",
    "flight": "InFlightStep",
    "flights": "InFlightStep",
    "filling": "prefilling",
    "tools": "PolicyContext",
    "tries": "backfill",
    "insists": "forbids_backfill",
    "books": "EngineMetrics",
    "trip": "RequestTiming",
    "trips": "RequestTiming",
    "foretell": "predict",
    "foretold": "predicted",
    "reckon": "predict",
    "gap": "itl",
    "gaps": "itl",
    "laws": "workload",
    "mend": "fix",
    "mended": "fixed",
    "whoever": "a request that",
    "cell": "token, or position",
    "cells": "tokens, or num_computed",
}
ALLOWED = {  # word -> where it may stand (a path below src/headway begins so), and what it means there
    "cell": ("kernels/", "models/", "runner/", "backends/", "bench/", "cli/"),  # the storage of one token; of a table
    "cells": ("kernels/", "models/", "runner/", "backends/", "bench/", "cli/"),
    "gap": ("bench/policy/workloads.py", "policies/_build.py"),  # between two arrivals; a former hook
    **dict.fromkeys(("rests", "doomed", "displaces", "displaced", "tries"), ("policies/_build.py",)),  # likewise
    "gaps": ("bench/policy/workloads.py",),
    "flight": ("core/", "engine/", "runner/"),  # `in_flight`
    "tools": ("kernels/cuda/", "serve/", "text/"),  # triton's package; the OpenAI field
}
ALIASES = {"gap_ms", "headway_kv_cells_live"}  # former names that are still written, for one release
PHRASES = re.compile(
    r"\b(whoever|somebody|anybody|everybody|nobody|foretell\w*|foretold|reckon\w*|hopeless|doomed|in vain"
    r"|sits? (?:down|out)|sat down|sitting out|gets? up|got up|knock\w*|turn(?:s|ed)? away|mended|mends?"
    r"|takes? a seat|seats?|seated|displace[sd]?|in no hurry|at the door|door is|was promised|were promised"
    r"|gaps? between (?:two )?tokens|request rests|who rests|rests for)\b",
    re.IGNORECASE,
)
PROSE_EXEMPT = (
    "docs/log.md",
    "docs/decisions",
    "CHANGELOG.md",
    "docs/glossary.md",
    "tools/check_vocabulary.py",
    "tests/test_vocabulary.py",
    "src/headway/policies/_build.py",  # names former hooks
)


def parts(name: str) -> list[str]:
    """The words of an identifier: `_ItlTarget` -> itl, target."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def retired(name: str, where: str) -> Iterator[str]:
    """A line for each retired word in an identifier that stands in this file of src/headway."""
    for word in parts(name) if name not in ALIASES else ():
        if word in INSTEAD and not where.startswith(ALLOWED.get(word, ("?",))):
            yield f"{name}: {word!r} is retired; say {INSTEAD[word]}"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and retired phrases."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in PHRASES.findall(line):
            yield number, f"{found!r} is retired; see docs/glossary.md"


def names(source: str) -> Iterator[tuple[int, str]]:
    """Identifiers, and strings that are one: metrics, fields, flags."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and (one := re.fullmatch(r"[rbf]*(['\"])([\w-]+)\1", token.string)):
            yield token.start[0], one[2]


def words_of(path: Path) -> Iterator[str]:
    """What is wrong in one file of src/headway."""
    text, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT / "src/headway").as_posix()
    for line, name in names(text):
        for fault in retired(name, where):
            yield f"src/headway/{where}:{line}: {fault}"


def repeated_classes(root: Path) -> Iterator[str]:
    """Class names that two files of a tree define."""
    first: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and first.setdefault(node.name, path) != path:
                yield f"{path}:{node.lineno}: class {node.name} is in {first[node.name]} too"


def faults() -> list[str]:
    found = list(repeated_classes(ROOT / "src"))
    for path in sorted((ROOT / "src/headway").rglob("*.py")):
        found += words_of(path)
    globs = ("*.md", "docs/**/*.md", "kernels/*.md", "scripts/*", "scripts/lib/*")
    pages = [path for pattern in globs for path in ROOT.glob(pattern) if path.is_file()]
    for path in sorted([*pages, *(p for top in ("src", "tests", "tools") for p in (ROOT / top).rglob("*.py"))]):
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith(PROSE_EXEMPT):
            found += [f"{where}:{line}: {fault}" for line, fault in prose(path.read_text(encoding="utf-8"))]
    return found


def main() -> int:
    found = faults()
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
