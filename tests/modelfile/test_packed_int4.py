"""AWQ and GPTQ checkpoints: the weights that their words stand for, and one answer with the unpacked model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headway import LLM, SamplingParams
from headway.errors import ModelFormatError
from headway.modelfile.cache import ModelCache
from headway.modelfile.groups import Groups
from headway.modelfile.packed_int4 import PackedInt4
from headway.modelfile.source import resolve
from tiny_dir import tiny_options, write_tiny_model
from tiny_models import random_tensors

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SIZES = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
Tensors = dict[str, np.ndarray]


def words(numbers: np.ndarray, order: list[int]) -> np.ndarray:
    """Numbers [rows, 8 n] of 4 bits as words [rows, n]; nibble i is that of column order[i]."""
    eights = numbers.reshape(len(numbers), -1, 8).astype(np.uint32)
    return sum((eights[:, :, column] << np.uint32(4 * at) for at, column in enumerate(order)), np.uint32(0)).view(
        np.int32
    )


def rounded(
    settings: dict[str, object], weight: np.ndarray, order: np.ndarray, seed: int
) -> tuple[Tensors, np.ndarray]:
    """The tensors of a matrix rounded in that way, with uneven zeros, and what they stand for [out, in]."""
    rng, (num_out, num_in) = np.random.default_rng(seed), weight.shape
    num_groups = num_in // 32
    scales = (rng.uniform(0.5, 1.5, (num_groups, num_out)) / 16).astype(np.float16)
    zeros = rng.integers(1, 16, (num_groups, num_out))
    q = np.clip(np.round(weight.T / scales[order].astype(np.float32)) + zeros[order], 0, 15).astype(np.int64)
    exact = scales[order].astype(np.float32) * (q - zeros[order]).astype(np.float32)
    if settings["quant_method"] == "awq":
        made = {"qweight": words(q, AWQ_ORDER), "qzeros": words(zeros, AWQ_ORDER), "scales": scales}
    else:
        shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        straight = list(range(8))
        made = {"qweight": words(q.T, straight).T.copy(), "qzeros": words(zeros - shift, straight), "scales": scales}
        made["g_idx"] = order.astype(np.int32)
    return made, exact.T


def write_model(folder: Path) -> None:
    """A tiny model whose matrices divide into words and groups."""
    spec = replace(write_tiny_model(folder), **SIZES)
    save_file(random_tensors(spec), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": spec.hidden, "intermediate_size": spec.intermediate, "head_dim": spec.head_dim}
    heads = {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads}))


def pack_model(folder: Path, settings: dict[str, object], *, is_shuffled: bool = False) -> Tensors:
    """Round the matrices of the layers of a tiny model; the weights they stand for."""
    tensors = load_file(folder / "model.safetensors")
    kept, exact = Tensors(), Tensors()
    for at, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim == 2 and ".layers." in name:
            order = np.arange(tensor.shape[1]) // 32
            if is_shuffled:
                np.random.default_rng(at).shuffle(order)
            made, exact[name] = rounded(settings, tensor, order, at)
            kept |= {f"{name.removesuffix('weight')}{part}": value for part, value in made.items()}
        else:
            kept[name] = exact[name] = tensor
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return exact


KINDS = {
    "awq": (AWQ, False),
    "gptq": (GPTQ, False),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, False),
    "gptq by importance": ({**GPTQ, "desc_act": True}, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_what_its_words_stand_for(tmp_path: Path, kind: str) -> None:
    settings, is_shuffled = KINDS[kind]
    write_model(tmp_path / "m")
    exact = pack_model(tmp_path / "m", settings, is_shuffled=is_shuffled)
    source = resolve(str(tmp_path / "m"), ModelCache(tmp_path / "cache"))
    found = dict(source.tensors())
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        np.testing.assert_array_equal(found[name], tensor)
    grouped = [tensor for _, tensor in source.grouped() if isinstance(tensor, Groups)]
    assert bool(grouped) is not is_shuffled
    stored = dict(source.stored())
    assert all(np.array_equal(stored[name], tensor) for name, tensor in exact.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    settings, is_shuffled = KINDS[kind]
    write_model(tmp_path / "packed")
    exact = pack_model(tmp_path / "packed", settings, is_shuffled=is_shuffled)
    write_model(tmp_path / "plain")
    plain = {name: np.ascontiguousarray(tensor) for name, tensor in exact.items()}
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    answers = []
    for name in ("packed", "plain"):
        with LLM(**tiny_options(tmp_path / name, dtype="float32")) as llm:  # type: ignore[arg-type]
            answers.append([each.outputs[0] for each in llm.generate(["one two", "the"], params)])
    assert [each.token_ids for each in answers[0]] == [each.token_ids for each in answers[1]]
    assert [each.logprobs for each in answers[0]] == [each.logprobs for each in answers[1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes' with 4 bits; allowed: awq and gptq with 4"),
        ({"bits": 8}, "with 8 bits"),
        ({"group_size": 48}, "group_size is 48; allowed: -1, or a multiple of 32"),
        ({"version": "gemv"}, "packed as 'gemv'; allowed: gemm"),
    ],
)
def test_other_ways_of_rounding_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        PackedInt4.read("config.json", {**AWQ, **changes})


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("scales", None, "lacks .*scales"),
        ("qzeros", np.zeros((1, 1), np.int32), "not groups of 32 inputs"),
        ("qzeros", np.zeros((2, 2), np.float32), "allowed: I32"),
        ("qweight", np.zeros((4, 0), np.int32), "allowed: I32"),
        ("g_idx", np.full(64, 9, np.int32), "g_idx does not name one of 2 groups"),
        ("g_idx", np.full(3, 0, np.int32), "g_idx does not name one of 2 groups"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, value: np.ndarray | None, words: str) -> None:
    write_model(tmp_path / "m")
    pack_model(tmp_path / "m", GPTQ)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(f"q_proj.{part}"))
    tensors.pop(name)
    save_file(tensors if value is None else {**tensors, name: value}, file)
    source = resolve(str(tmp_path / "m"), ModelCache(tmp_path / "cache"))
    with pytest.raises(ModelFormatError, match=words):
        list(source.grouped())


def test_words_are_no_weights_where_nothing_says_so(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    pack_model(tmp_path / "m", AWQ)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="number format 'I32'"):
        list(resolve(str(tmp_path / "m"), ModelCache(tmp_path / "cache")).tensors())
