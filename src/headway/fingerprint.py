"""Digests that say which code runs: of one file, and of headway's own source tree.

Two engines give equal bits only if they run equal code. `/version`, `doctor`, the log and the soak report these
digests, so that a rebuild between two runs shows. Knows no engine and no kernel.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

DIGITS = 16  # of the hexadecimal SHA-256: enough to tell builds apart, short enough to read


def file_digest(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]


def source_digest(root: Path = Path(__file__).parent) -> str:
    """Of every Python file below `root`, by relative path and content; headway's own tree by default."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:DIGITS]
