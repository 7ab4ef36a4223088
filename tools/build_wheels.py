"""Builds the wheels of headway-llm and headway-llm-kernels from this clone, and says what is in them.

    scripts/build-wheels [FOLDER]     # dist/ unless named

Needs pip and a C++ compiler. Where hatchling is installed nothing is fetched; elsewhere pip fetches it for the build.
The wheel of headway-llm is for any machine; that of headway-llm-kernels holds the library compiled here, for this kind
of machine and any Python 3. Its tag is linux_x86_64 or the like: it runs where the C library is as new as here.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"headway_llm": ROOT, "headway_llm_kernels": ROOT / "kernels"}


def build(folder: Path) -> list[Path]:
    """Both wheels, in place of those that were in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    offline = ("--no-build-isolation",) if importlib.util.find_spec("hatchling") else ()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", *offline)
    wheels: list[Path] = []
    for name, source in PARTS.items():
        for old in folder.glob(f"{name}-*.whl"):
            old.unlink()
        subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
        wheels += folder.glob(f"{name}-*.whl")
    return wheels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    try:
        wheels = build(parser.parse_args().folder)
    except subprocess.CalledProcessError as error:
        print(f"build-wheels: pip built no wheel (exit status {error.returncode}) and said why", file=sys.stderr)
        return 1
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            entries = archive.infolist()
        sizes = f"{wheel.stat().st_size:,} bytes, {len(entries)} files, {sum(e.file_size for e in entries):,} installed"
        print(f"build-wheels: {wheel} ({sizes})")
    print(f"build-wheels: install both with pip install {' '.join(map(str, wheels))}; nothing was uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
