"""Benches where the command line's packages are missing: `python -m headway.bench NAME`, with the same flags.

`headway bench` has the help and the checks; here flags are made from the signature of a bench's `run`. Those of a CUDA
device are modules with a main of their own (`python -m headway.bench.device`). Benches of the server need its packages.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.errors import EngineError

BENCHES = {
    "offline": "headway.bench.offline",
    "paging": "headway.bench.paging",
    "kernels": "headway.bench.kernels",
    "quality": "headway.bench.quality",
    "scheduler": "headway.bench.scheduler_cases",
    "policy": "headway.bench.policy.run",
    "kv": "headway.bench.kv",
    "depth": "headway.bench.depth",
}
_OTHERS = {"Sequence", "Callable"}  # arguments that no flag can give
_NAMES = {"cases": "case", "policies": "policy", "as_json": "json", "is_contiguous": "contiguous"}


def add_flags(parser: argparse.ArgumentParser, run: Callable[..., int]) -> None:
    """One flag for each argument of `run`; those of a model are the fields of its setup."""
    for name, parameter in inspect.signature(run).parameters.items():
        words = set(re.findall(r"\w+", str(parameter.annotation)))
        flag = f"--{_NAMES.get(name, name)}"
        required = parameter.default is inspect.Parameter.empty
        if name == "setup":
            _add_setup(parser)
        elif "bool" in words:
            parser.add_argument(flag, dest=name, action="store_true")
        elif name in ("cases", "policies"):
            parser.add_argument(flag, dest=name, action="append")
        elif kind := next((kind for kind in (int, Path, str) if kind.__name__ in words and not words & _OTHERS), None):
            parser.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, required=required)


def _add_setup(parser: argparse.ArgumentParser) -> None:
    from headway.bench.setup import ModelSetup

    for field in fields(ModelSetup):
        kind = int if field.name == "threads" else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", dest=f"setup.{field.name}", type=kind)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    from headway.bench.setup import ModelSetup

    chosen = {name.removeprefix("setup."): value for name, value in given.items() if name.startswith("setup.")}
    found = {name: value for name, value in given.items() if "." not in name and value is not None}
    if chosen and any(value is not None for value in chosen.values()):
        found["setup"] = ModelSetup(**chosen)
    return found


def main(argv: Sequence[str]) -> int:
    names = argparse.ArgumentParser(prog="headway.bench", description=__doc__)
    names.add_argument("bench", choices=BENCHES)
    name = names.parse_args(argv[:1]).bench
    run: Callable[..., int] = import_module(BENCHES[name]).run
    parser = argparse.ArgumentParser(prog=f"headway.bench {name}", description=run.__doc__)
    add_flags(parser, run)
    found = _arguments(vars(parser.parse_args(argv[1:])))
    parameter = inspect.signature(run).parameters.get("setup")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        from headway.bench.setup import ModelSetup

        found.setdefault("setup", ModelSetup())
    try:
        return run(**found)
    except EngineError as error:
        print(f"headway.bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
