"""Adapters in the engine: PEFT's own answers, and tokens that do not depend on company, preemption, depth or cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file

from adapter_files import adapter_tensors, random_adapter_files, write_adapter
from headway.config import EngineConfig
from headway.errors import ConfigError, ModelFormatError, RequestError
from headway.llm import LLM
from headway.modelfile import directory
from headway.modelfile.peft import read_adapter
from headway.models.adapter import AdapterRows
from headway.models.native import make_decoder
from headway.models.params import ModelWeights
from headway.models.registry import read_config
from headway.models.spec import ModelSpec
from headway.runner.adapters import fit_adapter
from headway.runner.weights import pack_weights
from headway.values.params import SamplingParams
from tiny_dir import tiny_options, write_tiny_model
from tiny_models import Driver, kernel_sets

FAMILIES: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen2": {}, "Phi3": {"pad_token_id": 0}, "Mixtral": {}}
SETS = {kernels.name: kernels for kernels in kernel_sets()}
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LORA: dict[str, dict[str, Any]] = {
    "all seven": {"r": 16, "lora_alpha": 32},
    "rslora": {"r": 5, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "r": 8,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 20},
        "alpha_pattern": {"o_proj": 2},
    },
    "two of them": {"r": 4, "target_modules": ["o_proj", "down_proj"]},
}


def peft_model(family: str, lora: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """A random model with a random adapter, not merged; its config and tensors; the adapter is saved in `folder`."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], attn_implementation="eager")
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder / "base")
    tensors: dict[str, np.ndarray] = {}
    for file in (folder / "base").glob("*.safetensors"):
        tensors |= load_file(file)
    fused = {"Phi3": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets = {"Mixtral": seven[:4]} | fused
    settings = {"target_modules": targets.get(family, seven), **LORA[lora]}
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value) * 0.1)
    wrapped.save_pretrained(folder / "adapter")
    words = json.loads((folder / "base" / "config.json").read_text())
    return wrapped.eval(), words, tensors


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("family", "lora"),
    [("Llama", each) for each in LORA] + [("Qwen2", "all seven"), ("Phi3", "rslora"), ("Mixtral", "rslora")],
)
def test_logits_and_greedy_tokens_are_those_of_peft(family: str, lora: str, name: str, tmp_path: Path) -> None:
    wrapped, config, tensors = peft_model(family, lora, tmp_path)
    spec = read_config(directory._with_rope(config))
    kernels = SETS[name]
    weights = ModelWeights(dict(pack_weights(tensors.items(), spec, kernels)), kernels.layout)
    decoder = make_decoder(spec, weights, kernels)
    adapter = fit_adapter(read_adapter(tmp_path / "adapter", 1 << 30), spec, "float32")
    prompts = [list(range(3, 40)), [5, 99, 3], [100, 1]]
    driver = Driver(decoder)  # type: ignore[arg-type]
    rows = [driver.add(prompt + [0] * 8) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        row.tokens = list(prompt)
    for step in range(8):
        work = [(row, len(row.tokens) - row.done) for row in rows]
        batch = driver.batch(work)
        of = np.zeros(len(batch.tokens), np.int32)
        logits = decoder.forward(replace(batch, adapters=AdapterRows(of, (adapter,))), driver.kv)
        end = 0
        for row, count in work:
            with torch.no_grad():
                wanted = wrapped(torch.tensor([row.tokens])).logits[0].numpy()
            ours = logits[end : end + count]
            assert np.abs(ours - wanted[-count:]).max() <= 1e-4, step
            assert ours[-1].argmax() == wanted[-1].argmax()
            row.done += count
            end += count
            row.tokens.append(int(ours[-1].argmax()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("tiny")
    spec = write_tiny_model(folder / "model")
    adapters = {name: random_adapter_files(folder / name, spec, at, size=0.7) for at, name in enumerate("abc")}
    return folder / "model", spec, adapters


PROMPTS = [[3 + (7 * i + 5 * r) % 90 for i in range(n)] for r, n in enumerate((40, 17, 33, 21, 38, 25))]
NAMES = ["a", "", "b", "a", "c", ""]
KINDS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True),
    "n=3": SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=3, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=24,
        temperature=0.8,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logprobs=2,
        ignore_eos=True,
    ),
}
PRESSED = {"recompute": {"num_blocks": 14}, "swap": {"num_blocks": 14, "swap_space_gb": 0.01}}


def answers(llm: LLM, params: SamplingParams, at: list[int], *, is_plain: bool = False) -> list[Any]:
    names = ["" if is_plain else NAMES[each] for each in at]
    done = llm.generate([PROMPTS[each] for each in at], params, adapter=names)
    return [[(out.token_ids, out.logprobs) for out in each.outputs] for each in done]


@pytest.fixture(scope="module")
def alone(tiny: tuple[Path, ModelSpec, dict[str, Path]]) -> dict[str, list[Any]]:
    """Each request by itself; those without an adapter in an engine that has none."""
    folder, _, adapters = tiny
    found: dict[str, list[Any]] = {}
    with (
        LLM(**tiny_options(folder, prefix_caching=False), adapters=adapters) as llm,
        LLM(  # type: ignore[arg-type]
            **tiny_options(folder, prefix_caching=False)  # type: ignore[arg-type]
        ) as plain,
    ):
        for kind, params in KINDS.items():
            found[kind] = [answers(llm if name else plain, params, [at])[0] for at, name in enumerate(NAMES)]
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pressed", PRESSED)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_each_request_alone(
    kind: str, pressed: str, depth: int, tiny: tuple[Path, ModelSpec, dict[str, Path]], alone: dict[str, list[Any]]
) -> None:
    folder, _, adapters = tiny
    options = tiny_options(folder, depth=depth, max_num_batched_tokens=24, max_num_seqs=12, **PRESSED[pressed])
    with LLM(**options, adapters=adapters) as llm:  # type: ignore[arg-type]
        assert answers(llm, KINDS[kind], list(range(len(NAMES)))) == alone[kind]
        assert llm.stats().preemptions > 0
        assert (llm.stats().swaps > 0) == (pressed == "swap")


def test_kernels_agree_on_which_adapter_a_row_has(tiny: tuple[Path, ModelSpec, dict[str, Path]]) -> None:
    """Equal prompts, other adapters: other answers. None: as in an engine without adapters."""
    folder, _, adapters = tiny
    with LLM(**tiny_options(folder), adapters=adapters) as llm, LLM(**tiny_options(folder)) as plain:  # type: ignore[arg-type]
        done = llm.generate([PROMPTS[0]] * 4, KINDS["greedy"], adapter=["a", "b", "c", ""])
        tokens = [each.outputs[0].token_ids for each in done]
        assert len(set(map(tuple, tokens))) == 4
        assert tokens[3] == plain.generate(PROMPTS[0], KINDS["greedy"])[0].outputs[0].token_ids  # type: ignore[arg-type]


def test_blocks_are_shared_within_an_adapter_and_not_with_other_weights_of_its_name(
    tiny: tuple[Path, ModelSpec, dict[str, Path]], tmp_path: Path
) -> None:
    folder, spec, adapters = tiny
    other = random_adapter_files(tmp_path / "a", spec, 9, size=0.7)
    ask = ([PROMPTS[0]], KINDS["greedy"])
    options = tiny_options(folder, kv_disk_bytes=10_000_000, kv_disk_dir=str(tmp_path / "kv"))
    with LLM(**options, adapters={"a": adapters["a"]}) as llm:  # type: ignore[arg-type]
        first = llm.generate(*ask, adapter="a")[0]
        assert first.num_cached == 0
        assert llm.generate(*ask, adapter="a")[0].num_cached > 0
        assert llm.generate(*ask)[0].num_cached == 0
        llm.unload_adapter("a")
        with pytest.raises(RequestError, match="adapter is 'a'; allowed: none: no adapter is loaded"):
            llm.generate(*ask, adapter="a")
        llm.load_adapter("a", other)
        changed = llm.generate(*ask, adapter="a")[0]
        assert changed.num_cached == 0
        assert changed.outputs[0].token_ids != first.outputs[0].token_ids
        llm.unload_adapter("a")
        llm.load_adapter("renamed", adapters["a"])  # the same weights: the same blocks, by whatever name
        again = llm.generate(*ask, adapter="renamed")[0]
        assert again.num_cached > 0
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
    with LLM(**options, adapters={"a": other}) as llm:  # type: ignore[arg-type]
        found = llm.generate(*ask, adapter="a")[0]
        assert found.outputs[0].token_ids == changed.outputs[0].token_ids  # whatever the disk has


def test_an_adapter_in_use_stays_and_room_is_bounded(
    tiny: tuple[Path, ModelSpec, dict[str, Path]], tmp_path: Path
) -> None:
    folder, _, adapters = tiny
    options = tiny_options(folder, adapter_memory_gb=200_000 / 2**30, dtype="float32")
    with LLM(**options, adapters={"a": adapters["a"]}) as llm:  # type: ignore[arg-type]
        stream = llm.stream("abc", {"max_tokens": 5, "ignore_eos": True}, adapter="a")
        next(stream)
        with pytest.raises(ConfigError, match="adapter 'a' is in use by 1 requests"):
            llm.unload_adapter("a")
        stream.close()
        with pytest.raises(ConfigError, match="is loaded with other weights; unload it first"):
            llm.load_adapter("a", adapters["b"])
        llm.load_adapter("b", adapters["b"])
        llm.load_adapter("c", adapters["c"])
        with pytest.raises(ConfigError, match="adapters may take; unload one"):
            llm.load_adapter("more", adapters["c"])
        llm.unload_adapter("a")
        with pytest.raises(ConfigError, match="is not loaded; there are: b, c"):
            llm.unload_adapter("a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "asks for 'use_dora'"),
        ({"modules_to_save": ["lm_head"]}, "asks for 'modules_to_save'"),
        ({"bias": "all"}, "asks for 'bias'"),
        ({"lora_bias": True}, "asks for 'lora_bias'"),
        ({"trainable_token_indices": [1]}, "asks for 'trainable_token_indices'"),
        ({"what_comes_next": {"x": 1}}, "asks for 'what_comes_next'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"r": 5}, "says rank 5"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern has"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern has"),
    ],
)
def test_what_is_not_run_is_named(
    change: dict[str, object], words: str, tiny: tuple[Path, ModelSpec, dict[str, Path]], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "x", adapter_tensors(tiny[1]), **change)
    with pytest.raises(ModelFormatError) as caught:
        read_adapter(folder, 1 << 30)
    assert words in str(caught.value)


def test_an_update_beyond_float32_is_refused_where_it_is_made(
    tiny: tuple[Path, ModelSpec, dict[str, Path]], tmp_path: Path
) -> None:
    large = {name: value * np.float32(1e19) for name, value in adapter_tensors(tiny[1]).items()}
    stored = read_adapter(write_adapter(tmp_path / "x", large, lora_alpha=9e8), 1 << 30)
    with pytest.raises(ModelFormatError, match=r"the adapter's \w+ of layer 0 is too large for float32 numbers"):
        fit_adapter(stored, tiny[1], "int8")


def test_hostile_files_are_refused(tiny: tuple[Path, ModelSpec, dict[str, Path]], tmp_path: Path) -> None:
    spec, tensors = tiny[1], adapter_tensors(tiny[1])
    name = next(iter(tensors))
    weights = tmp_path / "x" / "adapter_model.safetensors"

    def refused(words: str, most: int = 1 << 30) -> None:
        with pytest.raises(ModelFormatError) as caught:
            read_adapter(tmp_path / "x", most)
        assert words in str(caught.value)

    for changed, words in [
        ({**tensors, name: np.full_like(tensors[name], np.nan)}, "a number that is not finite"),
        ({**tensors, name: tensors[name][0]}, "shape [60]"),
        ({other: value for other, value in tensors.items() if other != name}, "lora_B alone"),
        ({**tensors, "base_model.model.lm_head.lora_A.weight": tensors[name]}, "lm_head.lora_A.weight"),
        ({**tensors, name.replace("lora_A.weight", "lora_magnitude_vector"): tensors[name]}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": tensors[name]}, "lora_embedding_A"),
    ]:
        write_adapter(tmp_path / "x", changed)
        refused(words)
    whole = weights.read_bytes()
    for data, words in [
        (whole[: len(whole) // 2], "lies at"),
        (b"", "its table is announced"),
        ((1 << 62).to_bytes(8, "little") + whole[8:], "its table is announced"),
        (b"\x10" + bytes(7) + b"[" * 16, "not JSON"),
    ]:
        weights.write_bytes(data)
        refused(words)
    weights.write_bytes(whole)
    refused("has more than 100 bytes", 100)
    weights.unlink()
    refused("cannot read")
    weights.mkdir()
    refused("cannot read")
    (tmp_path / "x" / "adapter_config.json").write_text("[" * 100_000)
    refused("is not JSON")
    with pytest.raises(ModelFormatError, match="there is no adapter directory"):
        read_adapter(tmp_path / "nowhere", 1)
    for change, words in [({"layers": 1}, "changes layer 1"), ({"hidden": 62}, "made for another model")]:
        write_adapter(tmp_path / "y", tensors)
        smaller = replace(spec, **change)
        with pytest.raises(ModelFormatError, match=words):
            fit_adapter(read_adapter(tmp_path / "y", 1 << 30), smaller, "float32")


def test_where_nothing_runs_adapters_that_is_said(tiny: tuple[Path, ModelSpec, dict[str, Path]]) -> None:
    folder, _, adapters = tiny
    with pytest.raises(ConfigError, match=r"adapters run on device cpu in one process .* not on tensor_parallel 2"):
        LLM(**tiny_options(folder, tensor_parallel=2), adapters=adapters)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="NAME=PATH"):
        EngineConfig.of(adapter=("no-path",))
    with pytest.raises(ConfigError, match="each name once"):
        EngineConfig.of(adapter=("a=x", "a=y"))
