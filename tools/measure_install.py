"""What a first start costs: a fresh clone, an empty HOME and one question, in seconds and bytes.

    scripts/measure-install                  # as a machine with a C++ compiler does it
    scripts/measure-install --no-compiler    # PATH without compilers: the torch kernels must take over and say so

Clones the last commit into a temporary folder and runs its scripts/serve with nothing of the caller but PATH, the
settings of pip and pip's cache. Sizes are those of files, 1 MB = 10^6 bytes; the model's file and its one conversion
are printed apart. Exit status 1: no answer, more than 200 MB beside the model's files, or the torch kernels not named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MB = 200.0
QUESTION = "What is the capital of France?"
COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|cpp|clang|clang\+\+|clang-cpp)(-[\d.]+)?")
# What a user's machine would have set up for pip; everything else of the environment stays outside.
KEPT = re.compile(r"PATH|LANG|LC_.*|PIP_.*|(https?|no|all)_proxy|SSL_CERT_.*|REQUESTS_CA_BUNDLE|TORCH_CPU_INDEX", re.I)


@dataclass(slots=True)
class Run:
    """One first start: what was said and when, and what came of it."""

    began: float = field(default_factory=time.perf_counter)
    said: list[str] = field(default_factory=list)
    ready_s: float = 0.0
    answer_s: float = 0.0
    answer: str = ""
    kernels: str = ""

    def hear(self, line: str) -> None:
        self.said.append(line)
        print(f"  {time.perf_counter() - self.began:6.1f} s  {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-compiler", action="store_true", help="hide every C++ compiler from the scripts")
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB, help="most beside the model's files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-install-") as scratch:
        folder = Path(scratch)
        clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        before = size(clone)
        run = start(clone, environment(folder, hides_compilers=args.no_compiler))
        if not run.answer:
            print("measure-install: there was no answer")
            return 1
        mb = sizes(folder, before)
    times = f"first answer after {run.answer_s:.1f} s, ready after {run.ready_s:.1f} s"
    print(f"\n{times}, kernels {run.kernels}: {run.answer}")
    for name, value in mb.items():
        print(f"  {value:8.1f} MB  {name}")
    if args.no_compiler:
        is_told = any("no C++ compiler" in line for line in run.said) and run.kernels == "ref"
        print(f"without a compiler: {'the torch kernels answered, and that was said' if is_told else 'NOT said'}")
        return 0 if is_told else 1
    total = mb["beside the model's files"]
    is_small = total <= args.limit_mb
    print(f"{total:.1f} MB beside the model's files, allowed {args.limit_mb:g}: {'ok' if is_small else 'TOO MUCH'}")
    return 0 if is_small else 1


def environment(folder: Path, *, hides_compilers: bool) -> dict[str, str]:
    """An empty HOME, pip's cache and a PATH; `folder` holds what is made for it."""
    found = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    found |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHON": sys.executable}
    found |= {"PIP_CACHE_DIR": cache.stdout.strip()} if cache.returncode == 0 else {}
    if hides_compilers:
        found["PATH"] = str(without_compilers(found["PATH"], folder / "bin"))
    return found


def without_compilers(path: str, target: Path) -> Path:
    """A folder of links to all programs of a PATH, the first of each name, except compilers."""
    target.mkdir()
    for place in path.split(os.pathsep):
        for program in sorted(Path(place).iterdir()) if Path(place).is_dir() else ():
            link = target / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program)
    return target


def start(clone: Path, env: dict[str, str]) -> Run:
    """Run scripts/serve in the clone until it has answered one question."""
    run = Run()
    with server(clone, env, run) as url:
        if url:
            run.ready_s = time.perf_counter() - run.began
            body = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
            model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
            data = json.dumps(body | {"model": model, "max_tokens": 32}).encode()
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
            run.answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
            run.answer_s = time.perf_counter() - run.began
            run.kernels = json.load(urllib.request.urlopen(f"{url}/version"))["kernels"]
    return run


@contextmanager
def server(clone: Path, env: dict[str, str], run: Run) -> Iterator[str]:
    """The server's address, or nothing if it ends before it has one."""
    command = [str(clone / "scripts/serve"), "--port", "0"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=clone, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        listener = threading.Thread(target=lambda: [*map(run.hear, map(str.rstrip, process.stderr))])
        listener.start()
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            yield found.group() if found else ""
        finally:
            process.terminate()
            process.communicate()
            listener.join()


def sizes(folder: Path, clone_bytes: int) -> dict[str, float]:
    """What lies where after the first answer, in MB; the clone's own files are not counted."""
    clone, home = folder / "clone", folder / "home"
    venv, ggufs = size(clone / ".venv"), sum(path.stat().st_size for path in (clone / ".venv").rglob("*.gguf"))
    converted = size(home / ".cache/headway")
    caches = size(home) - converted + size(folder / "tmp")
    others = size(clone) - venv - clone_bytes
    found = {
        ".venv without the model's file": venv - ggufs,
        "caches and temporary files": caches,
        "written into the clone beside .venv": others,
        "beside the model's files": venv - ggufs + caches + others,
        "the model's file (GGUF)": ggufs,
        "its conversion": converted,
    }
    return {name: value / 1e6 for name, value in found.items()}


def size(folder: Path) -> int:
    """Bytes of all files below a folder; links count as links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
