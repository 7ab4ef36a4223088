"""Packages of a few bytes for a real pip: wheels with chosen files, and a package index in a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> Path:
    """A wheel of `name` with these files in it."""
    stem = f"{name.replace('-', '_')}-{version}"
    entries = dict(files or {})
    entries[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    entries[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for entry, content in entries.items():
            wheel.writestr(entry, content)
        # pip removes what a record lists; it does not ask for sizes and digests.
        record = [*entries, f"{stem}.dist-info/RECORD"]
        wheel.writestr(record[-1], "".join(f"{entry},,\n" for entry in record))
    return path


def write_index(folder: Path, name: str, versions: Iterable[str]) -> str:
    """The address of a package index that offers these versions of one package."""
    page = folder / name
    page.mkdir(parents=True)
    names = [write_wheel(page, name, version).name for version in versions]
    (page / "index.html").write_text("".join(f'<a href="{wheel}">{wheel}</a>\n' for wheel in names))
    return folder.as_uri()
