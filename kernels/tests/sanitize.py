"""Builds the kernels with their C++ driver under each sanitizer and runs it: memory, undefined behaviour, races.

It knows how to compile and run; what is checked is in kernels.cpp and decoder.cpp beside it.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import build_library  # noqa: E402  (it lies beside the sources, in no package)

# One at a time: GCC 12 compiles each in a minute per level, the first two together not in ten.
SANITIZERS = {
    "memory": ("-fsanitize=address", "-fno-omit-frame-pointer"),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "threads": ("-fsanitize=thread",),
}
SPEED = ("-O1", "-g")


def compile_driver(
    compiler: str, folder: Path, sanitizer: tuple[str, ...] = (), machine: str = platform.machine()
) -> Path:
    """Every unit of the library and the driver, in one program."""
    units = {ROOT / "csrc" / name: flags for name, flags in build_library.units_for(machine).items()}
    for path in (ROOT / "tests").glob("*.cpp"):
        units[path] = ()
    common = [flag for flag in build_library.COMMON if not flag.startswith("-O")]

    def compile_unit(source: Path) -> str:
        output = folder / f"{source.parent.name}-{source.name}.o"
        flags = (*common, *SPEED, *build_library.STRICT, *sanitizer, *units[source])
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(output)], check=True)
        return str(output)

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_unit, units))
    program = folder / "drive"
    subprocess.run([compiler, "-pthread", *sanitizer, *objects, "-o", str(program)], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="random shapes of each kernel per level")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(SANITIZERS), help="one of the runs")
    options = parser.parse_args()
    compiler = build_library.find_compiler()
    if compiler is None:
        print("no C++ compiler found: install g++ or clang++, or name one in CXX", file=sys.stderr)
        return 1
    for name, sanitizer in SANITIZERS.items():
        if options.only not in (None, name):
            continue
        print(f"{name}: {' '.join(sanitizer)}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            program = compile_driver(compiler, Path(scratch), sanitizer)
            done = subprocess.run([str(program), str(options.rounds), str(options.seed)], check=False)
        if done.returncode:
            print(f"{name}: failed with status {done.returncode}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
