"""The kernels that make a step's inputs and sample compile for a device: the interpreter takes what a compiler refuses.

They are compiled in a process of their own, since Triton decides when it is imported whether it interprets. No device
is needed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not imported: the tests beside this one set up how it is imported in this process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from headway.kernels.cuda import rows, sampling, special

CASES = (
    (sampling.parts, {"CH": 4096, "PDL": True}),
    (sampling.draw, {"CH": 4096, "NP": 32, "PDL": True}),
    (special.special, {"SLOTS": 4, "CH": 4096, "PDL": True}),
    (rows.prepare_decode, {"KVH": 8, "BS": 16, "BLOCK": 512}),
    (rows.prepare_chunks, {"BS": 16, "BLOCK": 1024}),
)
REALS = {"logits": "*bf16", "part_max": "*fp32", "part_sum": "*fp32", "scratch": "*fp32", "lp_values": "*fp32"}
for kernel, constants in CASES:
    kinds = {name: "i32" if name.isupper() else REALS.get(name, "*i32") for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print("compiled", len(CASES))
"""


def test_the_kernels_around_a_step_compile_for_hopper(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # A file: Triton reads a kernel's source, which a program given as text has not.
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.stdout == "compiled 5\n", done.stderr[-2000:]
