"""What may be imported and said where, beyond the layer contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from source_tree import Source, imports, parse, sources

# The plain-torch kernels, what runs on CUDA devices, what several processes gather by, and the benches of both.
# Nothing else needs torch installed.
TORCH_KERNELS = frozenset(
    {"kernels.ref", "kernels.ref_kv", "kernels.ref_q4", "kernels.ref_q8", "kernels.ref_quant", "kernels.threads"}
)
GATHERS = frozenset({"runner.gather"})
CUDA = frozenset({"kernels.cuda", "runner.cuda", "models.cuda", "backends.cuda"})
TORCH_BENCHES = frozenset(
    f"bench.{name}"
    for name in ("kernels", "reference", "device", "device_kernels", "device_open", "device_quality", "device_swap")
)
ARRAY_BENCHES = frozenset(
    f"bench.{name}" for name in ("adapted", "attention", "baseline", "machine", "quality", "recorder", "verify")
)

# Third-party package -> modules that may import it. Any other package must not be imported.
ALLOWED = {
    "torch": TORCH_KERNELS | GATHERS | CUDA | TORCH_BENCHES,
    "numpy": TORCH_BENCHES
    | ARRAY_BENCHES
    | {"runner", "models", "layers", "kernels", "backends", "modelfile", "rank"}
    | {"embedding.model"},
    "safetensors": frozenset({"modelfile", "runner"}),
    "tokenizers": frozenset({"text", "modelfile"}),
    "jinja2": frozenset({"text"}),
    "llguidance": frozenset({"grammar"}),  # imported when the first grammar comes
    "msgspec": frozenset(
        {"serve", "cli", "engine.wire", "engine.process", "engine.child", "runner.lockstep", "cluster.spawn"}
        | {"cluster.ray_orders", "embedding.frames"}
    ),
    "starlette": frozenset({"serve"}),
    "uvicorn": frozenset({"serve"}),
    "httptools": frozenset({"serve.protocol"}),
    "uvloop": frozenset({"serve"}),
    "prometheus_client": frozenset({"serve"}),
    "opentelemetry": frozenset({"serve.tracing"}),  # the extra otel; imported where traces are asked for
    "cyclopts": frozenset({"cli"}),
    "xxhash": frozenset({"engine.tier.record", "cluster.fetch"}),  # checksums of KV blocks outside the pool
    "rich": frozenset({"cli", "modelfile", "bench.console"}),
    "huggingface_hub": frozenset({"modelfile.pull"}),
    "ray": frozenset({"cluster.ray_app"}),  # the extra ray; imported by a process of its own, where --ray asks for it
    "nixl": frozenset({"cluster.nixl_link"}),  # no dependency: used where it is installed and asked for
    "yaml": frozenset({"cli"}),
    "headway_kernels": frozenset({"kernels"}),
    "transformers": frozenset({"bench.reference"}),  # what `headway verify` compares with, where it is installed
    "triton": frozenset({"kernels.cuda", "runner.cuda"}),  # not installed where there is no CUDA device
}
PURE = frozenset({"core", "kv", "values", "control"})
# Pure: no clock, no loop, no environment, no threads, no files.
IMPURE = frozenset(
    {
        "time",
        "asyncio",
        "threading",
        "multiprocessing",
        "os",
        "io",
        "pathlib",
        "socket",
        "subprocess",
        "random",
        "logging",
    }
)
UNSAFE_CALLS = frozenset({"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "__import__"})
UNSAFE_MODULES = frozenset({"pickle", "dill", "shelve", "marshal"})
# One file knows which request owns which block; all others ask it through `core/memory.py`.
LEDGER = "core.ledger"
LEDGER_PARTS = frozenset({"pool", "host", "index"})
LEDGER_MODULES = {"headway.kv.blocks": {"BlockPool"}, "headway.kv.prefix": {"PrefixIndex"}}
READS_ENVIRONMENT = frozenset({"os.environ", "os.getenv", "os.environb"})
FORBIDDEN_NAMES = ("Manager", "Handler", "Utils", "Base", "Impl")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def import_faults(source: Source) -> Iterator[str]:
    for line, module in imports(source.tree):
        top = module.partition(".")[0]
        if top in UNSAFE_MODULES:
            yield f"line {line}: {top} runs code from data"
        elif source.within(PURE) and top in IMPURE:
            yield f"line {line}: core, kv, values and control are pure and must not import {top}"
        elif top != "headway" and top not in sys.stdlib_module_names:
            if top not in ALLOWED:
                yield f"line {line}: {top} is not a dependency; add it to the table with a reason"
            elif not source.within(ALLOWED[top]):
                yield f"line {line}: {top} is allowed only in {', '.join(sorted(ALLOWED[top]))}"


def syntax_faults(source: Source) -> Iterator[str]:
    in_cli = source.within(frozenset({"cli"}))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: no global statement"
        elif isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS:
            yield f"line {node.lineno}: {dotted(node.func)} runs code from data"
        elif isinstance(node, ast.Attribute) and not in_cli and dotted(node) in READS_ENVIRONMENT:
            yield f"line {node.lineno}: only cli reads the environment"
        elif isinstance(node, ast.ClassDef) and node.name.endswith(FORBIDDEN_NAMES):
            yield f"line {node.lineno}: {node.name} says nothing; name what it is"


def ledger_faults(source: Source) -> Iterator[str]:
    if source.name == LEDGER:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & LEDGER_MODULES.get(node.module or "", set())
            if names:
                yield f"line {node.lineno}: {names.pop()} belongs to the ledger"
            if node.module == f"headway.{LEDGER}" and source.within(frozenset({"core"})):
                yield f"line {node.lineno}: core knows ledgers by core.memory"
        elif isinstance(node, ast.Attribute) and node.attr in LEDGER_PARTS and is_ledger(node.value):
            yield f"line {node.lineno}: only the ledger touches its {node.attr}"


def is_ledger(node: ast.expr) -> bool:
    return dotted(node).rpartition(".")[2].lstrip("_") == "ledger"


def faults(source: Source) -> list[str]:
    return [*import_faults(source), *syntax_faults(source), *ledger_faults(source)]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name or "headway")
def test_module_imports_and_says_only_what_its_layer_may(source: Source) -> None:
    assert faults(source) == []


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name or "headway")
def test_module_says_what_it_owns(source: Source) -> None:
    assert not source.text.strip() or ast.get_docstring(source.tree), "a module docstring says what the file owns"


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("core/x.py", "import time"),
        ("core/x.py", "from os import environ"),
        ("core/x.py", "import numpy"),
        ("control/x.py", "import time"),
        ("kv/x.py", "import random"),
        ("engine/engine.py", "import msgspec"),
        ("text/x.py", "import torch.nn"),
        ("serve/x.py", "def f():\n    import torch"),
        ("models/x.py", "import triton"),
        ("models/native.py", "import torch"),
        ("runner/executor.py", "def f():\n    import torch"),
        ("serve/x.py", "import ray"),
        ("cluster/x.py", "def f():\n    from ray import serve"),
        ("models/x.py", "import transformers"),
        ("runner/x.py", "import torch\ntorch.load('w.pt')"),
        ("runner/x.py", "import pickle"),
        ("build.py", "import os\nos.environ['A']"),
        ("build.py", "import os\nos.getenv('A')"),
        ("llm.py", "def f():\n    global A\n    A = 1"),
        ("llm.py", "eval('1')"),
        ("engine/x.py", "class RowManager: ..."),
        ("core/x.py", "from headway.kv.blocks import BlockPool"),
        ("policies/x.py", "from headway.kv.prefix import PrefixIndex"),
        ("core/phases/x.py", "from headway.core.ledger import KVLedger"),
        ("engine/x.py", "def f(state):\n    return state.ledger.pool.available"),
        ("core/x.py", "def f(self):\n    self._ledger.index.forget(1)"),
    ],
)
def test_a_breach_is_found(tmp_path_factory: pytest.TempPathFactory, where: str, line: str) -> None:
    root = tmp_path_factory.mktemp("src")
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert faults(parse(path, root))
