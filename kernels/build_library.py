"""Compiles the kernels into one shared library with the C++ compiler of this machine; needs Python's own library only.

Used by the wheel's build hook, by scripts/build-kernels and by the tests. Each instruction level is its own object,
compiled with its own machine flags; which of them runs is decided when the library is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "libheadway_kernels.so"
DIGEST = "source.sha256"

# No contraction: the compiler must not decide where a multiply and an add are rounded once. No fast-math either.
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
WARNINGS = ("-Wall", "-Wextra")
STRICT = (*WARNINGS, "-Werror")  # for the tests: a user's newer compiler may warn of more
PORTABLE: dict[str, tuple[str, ...]] = {
    "api.cpp": (),
    "api_kv.cpp": (),
    "pool.cpp": (),
    "decoder.cpp": (),
    "step.cpp": (),
    "level_generic.cpp": (),
}
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
X86_64 = {
    "level_avx2.cpp": AVX2,
    "level_avx512.cpp": AVX512,
    "level_avx512vnni.cpp": (*AVX512, "-mavx512vnni"),
}


def units_for(machine: str) -> dict[str, tuple[str, ...]]:
    """The sources of a library for this machine and the flags of each: every level on x86-64, else the generic one."""
    if machine.lower() not in ("x86_64", "amd64"):
        return dict(PORTABLE)
    return {name: (*flags, "-DHWK_X86_LEVELS") for name, flags in {**PORTABLE, **X86_64}.items()}


def wheel_platform(platform_name: str, machine: str) -> str:
    """The platform tag of a wheel that holds a library compiled here; `platform_name` as sysconfig gives it.

    A Python for macOS may serve two machines, and its name says so; the library is for one. Python's name for macOS
    also has the oldest system it runs on; the library needs at least 10.15, which has aligned_alloc, and arm64 11.0.
    """
    if platform_name.startswith("macosx-"):
        _, version, _ = platform_name.split("-")
        least = "11.0" if machine == "arm64" else "10.15"
        version = max(version, least, key=lambda text: [int(part) for part in text.split(".")])
        platform_name = f"macosx-{version}-{machine}"
    return platform_name.replace("-", "_").replace(".", "_")


def find_compiler() -> str | None:
    """The compiler to use: $CXX, else g++, clang++ or c++ from PATH; None where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def source_digest(root: Path) -> str:
    """Names the sources and this file: equal digests build equal libraries on one machine."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((root / "csrc").iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(
    root: Path,
    target: Path,
    compiler: str,
    machine: str = platform.machine(),
    warnings: tuple[str, ...] = WARNINGS,
) -> Path:
    """Compiles root/csrc into target/libheadway_kernels.so and writes the digest beside it; returns the library.

    Another `machine` than this one needs a compiler for it.
    """
    units = units_for(machine)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:

        def compile_unit(name: str) -> str:
            output = str(Path(scratch) / f"{name}.o")
            subprocess.run(
                [compiler, *COMMON, *warnings, *units[name], "-c", str(root / "csrc" / name), "-o", output], check=True
            )
            return output

        with ThreadPoolExecutor() as threads:
            objects = list(threads.map(compile_unit, units))
        linked = target / f"{LIBRARY}.new"
        subprocess.run([compiler, "-shared", "-pthread", *objects, "-o", str(linked)], check=True)
    # A process may have the old library mapped: replace the name, never the bytes.
    linked.replace(target / LIBRARY)
    (target / DIGEST).write_text(source_digest(root) + "\n", encoding="ascii")
    return target / LIBRARY


if __name__ == "__main__":
    chosen = find_compiler()
    if chosen is None:
        sys.exit("no C++ compiler found: install g++ or clang++, or name one in CXX")
    print(build(Path(__file__).resolve().parent, Path(sys.argv[1]), chosen))
