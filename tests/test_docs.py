"""What the documents show works: code blocks run, links lead somewhere, examples stay short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headway import plugins
from headway.core.policy import Policy
from headway.core.request import Request
from headway.kernels import ref
from headway.values.params import SamplingParams

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


def example(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code a page shows, imported as a module called `name`."""
    (block,) = code_blocks(ROOT / "docs" / page, "python")
    (tmp_path / f"{name}.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    return import_module(name)


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


def test_the_example_family_names_every_tensor_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = example("adding-a-model.md", "example_phi3", tmp_path, monkeypatch)
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 128, "sliding_window": 2047}
    spec = family.spec(config)
    assert (spec.family, spec.max_len) == ("phi3", 2047)
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


def test_the_example_kernel_keeps_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = example("adding-a-kernel.md", "example_kernels", tmp_path, monkeypatch).load()
    x, weight = torch.randn(19, 100, generator=torch.Generator().manual_seed(1)), torch.linspace(0.5, 2, 100)
    together = kernels.rms_norm(x, weight, 1e-5)
    assert torch.allclose(together, ref.load().rms_norm(x, weight, 1e-5), atol=1e-6)
    for row in range(19):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])
