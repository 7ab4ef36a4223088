"""What the documents show works: code blocks run, links lead somewhere, examples stay short."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers

import gguf_files
import headway.models
from conformance import CHECKS, SHARES
from headway import plugins
from headway.core.policy import Policy
from headway.core.request import Request
from headway.kernels import ref
from headway.modelfile.cache import ModelCache
from headway.modelfile.source import resolve
from headway.models.registry import parameters, read_config
from headway.values.params import SamplingParams
from tiny_dir import write_tiny_model
from vocabularies import byte_level

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MAX_EXAMPLE_LINES = 60


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            yield target.partition("#")[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    assert [target for target in links(path) if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/adding-a-*.md")), ids=lambda path: path.name)
def test_worked_examples_stay_short(path: Path) -> None:
    blocks = code_blocks(path, r"(?:python|cpp)")
    assert blocks
    assert sum(len(block.splitlines()) for block in blocks) < MAX_EXAMPLE_LINES


def write_example(page: str, name: str, folder: Path) -> None:
    """The code a page shows, as the module `name` in a folder."""
    (block,) = code_blocks(ROOT / "docs" / page, "python")
    path = folder / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block)


def example(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code a page shows, imported as a module called `name`."""
    write_example(page, name, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return import_module(name)


def command_of(page: str, program: str) -> list[str]:
    """The arguments of the one command with this program that a page shows."""
    text = (ROOT / "docs" / page).read_text()
    (line,) = re.findall(rf"^(?:[A-Z]+=\S+ )*{program} (.*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_the_example_policy_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("adding-a-policy.md", "example_policy", tmp_path, monkeypatch)
    policy = plugins.load("policies", "example_policy:PLUGIN")()
    assert isinstance(policy, Policy)
    short, long, old = (
        Request(id=id, tokens=[0] * length, params=SamplingParams(), arrival=arrival)
        for id, length, arrival in ((1, 10, 100.0), (2, 900, 100.0), (3, 900, 80.0))
    )
    assert sorted([short, long, old], key=policy.key) == [old, short, long]
    assert max([short, long], key=policy.victim_key) is short


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """An environment in which the example policy lies outside the package, in the file the page names."""
    write_example("adding-a-policy.md", "my_policies.short", tmp_path)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def test_the_example_policy_runs_from_outside_by_its_name(tmp_path: Path, outside: dict[str, str]) -> None:
    metadata, tensors = gguf_files.tiny_model()
    model = gguf_files.write(tmp_path / "tiny.gguf", metadata, tensors)
    prompts = ["abc " * 9, "a", "abc " * 5]

    def answers(policy: list[str]) -> tuple[list[object], list[int]]:
        """Of all prompts, and in which order they got the one slot."""
        log = tmp_path / "steps"
        fields = {"model": model, "cache-dir": tmp_path / "cache", "num-blocks": 64, "max-num-seqs": 1, "step-log": log}
        fields |= {"max-tokens": 4, "temperature": 0, "threads": 1}
        flags = [f"--{name}={value}" for name, value in fields.items()]
        command = [sys.executable, "-m", "headway.cli.main", "generate", *prompts, "--json", "--ignore-eos"]
        done = subprocess.run([*command, *flags, *policy], env=outside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in log.read_text().splitlines()]
        admitted = [event["id"] for event in events if event["event"] == "Admitted"]
        first = min(admitted)
        return [json.loads(line)["outputs"] for line in done.stdout.splitlines()], [id - first for id in admitted]

    _, *policy = command_of("adding-a-policy.md", "headway")
    texts, order = answers(policy)
    usual, arrivals = answers([])
    assert (order, arrivals) == ([1, 2, 0], [0, 1, 2])
    assert texts == usual


def test_the_example_policy_passes_the_conformance_suite(outside: dict[str, str]) -> None:
    arguments = command_of("adding-a-policy.md", "scripts/test")
    assert arguments[-1] == command_of("adding-a-policy.md", "headway")[-1]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments, "-k", "ShortestFirst"]
    done = subprocess.run(command, env=outside, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.findall(r"^PASSED \S+must\[(.*)-(\w+)\]$", done.stdout, re.MULTILINE)
    assert {check for _, check in passed} == CHECKS.keys()
    assert len({variant for variant, _ in passed}) == 1 + len(SHARES)


def test_the_example_family_names_every_tensor_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = example("adding-a-model.md", "example_phi3", tmp_path, monkeypatch)
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 128, "sliding_window": 2047}
    spec = family.spec(config)
    assert (spec.family, spec.max_len, spec.windows) == ("phi3", 4096, (2047,))
    shapes = {part.source: parameter.part_shape(part) for parameter in family.weights(spec) for part in parameter.parts}
    assert shapes == {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.qkv_proj.weight": (128, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.layers.0.mlp.gate_up_proj.weight": (192, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 96),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }


def run_page(
    page: str, folder: Path, model: str | None = None, more: Sequence[str] = ()
) -> dict[str, dict[str, object]]:
    """Run the one `headway verify` that a page shows, in a folder; the rows of its table by their checks."""
    verify, shown, *flags = command_of(page, "headway")
    command = [sys.executable, "-m", "headway.cli.main", verify, model or shown, *flags, *more, "--json"]
    own = ["--cache-dir=cache", "--threads=1", "--prompts=2", "--tokens=6"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([*command, *own], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["check"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


def write_phi3(folder: Path) -> None:
    """A tiny random Phi-3 as transformers saves it."""
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 263}
    config = transformers.Phi3Config(**sizes, **heads, **ids, initializer_range=0.2)
    torch.manual_seed(7)
    transformers.Phi3ForCausalLM(config).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))


def test_the_model_page_followed_literally_runs_phi3_as_transformers_does(tmp_path: Path) -> None:
    write_example("adding-a-model.md", "phi3_family", tmp_path)
    write_phi3(tmp_path / "my-phi3")
    rows = run_page("adding-a-model.md", tmp_path)
    assert {row["differing"] for row in rows.values()} == {0}
    assert rows["transformers tokens"]["compared"] == "12 tokens"


def test_the_example_family_reads_gguf_files_by_its_own_names(tmp_path: Path) -> None:
    write_example("adding-a-model.md", "phi3_family", tmp_path)
    metadata, tensors = gguf_files.tiny_model("phi3", tied=False)
    for layer in (0, 1):
        for name, parts in {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}.items():
            joined = np.concatenate([tensors.pop(f"blk.{layer}.{part}.weight") for part in parts])
            tensors[f"blk.{layer}.{name}.weight"] = joined
    gguf_files.write(tmp_path / "phi3.gguf", metadata, tensors)
    rows = run_page("adding-a-model.md", tmp_path, "phi3.gguf")
    assert {row["differing"] for row in rows.values()} == {0}
    assert rows["transformers tokens"]["compared"] == "12 tokens"


def test_the_example_family_inside_the_package_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example("adding-a-model.md", "phi3", tmp_path / "models")
    monkeypatch.setattr(headway.models, "__path__", [*headway.models.__path__, str(tmp_path / "models")])
    write_phi3(tmp_path / "my-phi3")
    source = resolve(str(tmp_path / "my-phi3"), ModelCache(tmp_path / "cache"))
    spec = read_config(source.config)
    places = {part.source for parameter in parameters(spec) for part in parameter.parts}
    assert (spec.family, {name for name, _ in source.tensors()}) == ("phi3", places)


def test_the_example_kernel_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = example("adding-a-kernel.md", "example_kernels", tmp_path, monkeypatch).load(1, "float32")
    x = np.random.default_rng(1).standard_normal((19, 100), np.float32)
    weight = np.linspace(0.5, 2, 100, dtype=np.float32)
    together = kernels.rms_norm(x, weight, 1e-5)
    assert np.allclose(together, ref.load().rms_norm(x, weight, 1e-5), atol=1e-6)
    for row in range(19):
        assert np.array_equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


@pytest.mark.parametrize("more", [[], ["--dtype=float32"], ["--dtype=q4", "--kv-dtype=int8"]])
def test_the_kernel_page_followed_literally_runs_in_every_number_format(tmp_path: Path, more: list[str]) -> None:
    write_example("adding-a-kernel.md", "double_norm", tmp_path)
    write_tiny_model(tmp_path / "my-model")
    rows = run_page("adding-a-kernel.md", tmp_path, more=more)
    assert {row["differing"] for row in rows.values()} == {0}
    assert rows["transformers tokens"]["compared"] == "12 tokens"
