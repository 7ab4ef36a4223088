"""An adapter's directory as PEFT saves it: adapter_config.json and adapter_model.safetensors.

What is read is LoRA of the layers' matrices; whatever else a configuration asks for is refused by its name, what we do
not know included. Nothing of a directory is trusted: sizes are bounded before anything is read, files are read whole
and not mapped, and every number is looked at. It knows no model: whether the shapes fit one is for others to say.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.errors import ModelFormatError
from headway.modelfile.dequant import dequantize
from headway.modelfile.safetensors import parse

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANKS = 256
_MOST_CONFIG_BYTES = 1 << 20
_HARMLESS = frozenset(
    {
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern"),
        *("alpha_pattern", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "eva_config"),
        *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    }
)
"""Fields that are read, or change nothing once an adapter is trained; of any other, only an empty one is taken."""
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the weights of the model itself
_EMPTY: tuple[object, ...] = (None, False, 0, "", "none", [], {})
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(0|[1-9]\d{0,5})\.(?:self_attn|mlp)\."
    r"([qkvo]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|down_proj)\.lora_([AB])\.weight",
    re.ASCII,
)
_PATTERN = re.compile(r"\^?[\w.]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredLora:
    """The update of one matrix: scale * b a, float32."""

    a: NDArray[np.float32]  # [rank, in]
    b: NDArray[np.float32]  # [out, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Every module it changes, by layer and name as transformers has them; `digest` is of what it computes."""

    modules: Mapping[tuple[int, str], StoredLora]
    digest: str


def read_adapter(path: Path, most_bytes: int) -> PeftAdapter:
    """Read a directory whose weights have up to so many bytes; ModelFormatError says what is wrong with it."""
    config = _config(path)
    raw = _read(path / WEIGHTS, most_bytes, "the memory for adapters has no room for more")
    try:
        table = parse(raw)
    except ModelFormatError as error:
        raise ModelFormatError(f"{path / WEIGHTS} is not a safetensors file headway can read: {error}") from None
    found: dict[tuple[int, str], dict[str, NDArray[np.float32]]] = {}
    for name, stored in table.items():
        fields = _TENSOR.fullmatch(name)
        if fields is None:
            raise ModelFormatError(
                f"{path / WEIGHTS} has the tensor {name!r:.200}; allowed are lora_A and lora_B of q_proj, k_proj, "
                "v_proj, o_proj, gate_proj, up_proj and down_proj of the model's layers"
            )
        data = memoryview(raw)[stored.offset : stored.offset + stored.num_bytes]
        values = dequantize(data, stored.type).reshape(stored.shape)
        if values.ndim != 2 or not values.size or not np.isfinite(values).all():
            is_matrix = values.ndim == 2 and values.size
            what = "a number that is not finite" if is_matrix else f"shape {list(stored.shape)}"
            raise ModelFormatError(f"{path / WEIGHTS}: the tensor {name!r} has {what}; it takes a matrix of numbers")
        sides = found.setdefault((int(fields[1]), fields[2]), {})
        if fields[3] in sides:
            raise ModelFormatError(f"{path / WEIGHTS} has lora_{fields[3]} of {fields[2]} in layer {fields[1]} twice")
        sides[fields[3]] = values
    if not found:
        raise ModelFormatError(f"{path / WEIGHTS} has no tensors")
    modules = {key: _module(path, config, key, found[key]) for key in sorted(found)}
    return PeftAdapter(modules, _digest(modules))


def _module(
    path: Path, config: Mapping[str, object], key: tuple[int, str], sides: Mapping[str, NDArray[np.float32]]
) -> StoredLora:
    layer, name = key
    where = f"{path / WEIGHTS}: {name} of layer {layer}"
    if sides.keys() != {"A", "B"}:
        raise ModelFormatError(f"{where} has lora_{''.join(sides)} alone; it takes lora_A and lora_B")
    a, b = sides["A"], sides["B"]
    part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj") else "mlp"
    full = f"model.layers.{layer}.{part}.{name}"
    rank = _by_pattern(config, "rank_pattern", full, _number(config, "r"))
    alpha = _by_pattern(config, "alpha_pattern", full, _number(config, "lora_alpha"))
    if not (len(a) == b.shape[1] == rank and 1 <= rank <= MOST_RANKS):
        raise ModelFormatError(
            f"{where}: lora_A is {list(a.shape)} and lora_B {list(b.shape)} where {CONFIG} says rank {rank:g}; "
            f"allowed: [rank, in] and [out, rank] with a rank of 1 to {MOST_RANKS}"
        )
    return StoredLora(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _config(path: Path) -> Mapping[str, object]:
    if not path.is_dir():
        raise ModelFormatError(f"there is no adapter directory {path}; it holds {CONFIG} and {WEIGHTS}")
    file = path / CONFIG
    try:
        config = json.loads(_read(file, _MOST_CONFIG_BYTES, "no real one is that large"))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFormatError(f"{file} is not a JSON object")
    for name, allowed in (("peft_type", ("LORA",)), ("task_type", ("CAUSAL_LM", None)), ("init_lora_weights", _INITS)):
        value = config.get(name)
        if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
            words = ", ".join(str(each) for each in allowed)
            raise ModelFormatError(f"{file}: {name} is {value!r:.100}; allowed: {words}")
    for name, value in config.items():
        if name not in _HARMLESS and not _is_empty(name, value):
            raise ModelFormatError(
                f"{file} asks for {name!r:.100} ({value!r:.100}), which headway does not run: it runs plain LoRA of "
                "the layers' matrices"
            )
    if not isinstance(config.get("use_rslora", False), bool):
        raise ModelFormatError(f"{file}: use_rslora is {config['use_rslora']!r:.100}; allowed: true or false")
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(file, name, config.get(name))
    return config


def _is_empty(name: str, value: object) -> bool:
    """Whether a field says nothing; the configuration of a way to initialize is of no interest afterwards."""
    is_initial = name in ("loftq_config", "corda_config", "lora_ga_config")
    return is_initial or any(value == each and type(value) is type(each) for each in _EMPTY)


def _check_patterns(file: Path, name: str, value: object) -> None:
    patterns = value if isinstance(value, dict) else {} if value is None else {"": None}
    for key, number in patterns.items():
        if not _PATTERN.fullmatch(key) or not _is_number(number):
            raise ModelFormatError(
                f"{file}: {name} has {key!r:.100} with {number!r:.100}; allowed: a module's name, or the end of one "
                "such as layers.0.self_attn.q_proj, with a number above 0"
            )


def _by_pattern(config: Mapping[str, object], name: str, module: str, default: float) -> float:
    patterns = config.get(name)
    for key, value in (patterns if isinstance(patterns, dict) else {}).items():
        ends = module == key.removeprefix("^") or (not key.startswith("^") and module.endswith("." + key))
        if ends and isinstance(value, int | float):
            return float(value)
    return default


def _number(config: Mapping[str, object], name: str) -> float:
    value = config.get(name, 8)  # as PEFT has it
    if not _is_number(value) or not isinstance(value, int | float):
        raise ModelFormatError(f"{CONFIG}: {name} is {value!r:.100}; allowed: a number above 0")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _read(file: Path, most: int, why: str) -> bytes:
    """A regular file's bytes: what is waited for, or has no end, is not opened."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ModelFormatError(f"{file} is not a regular file")
            raw = opened.read(most + 1)
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"cannot read {file}: {error}; PEFT's save_pretrained writes it") from None
    if len(raw) > most:
        raise ModelFormatError(f"{file} has more than {most} bytes; {why}")
    return raw


def _digest(modules: Mapping[tuple[int, str], StoredLora]) -> str:
    digest = sha256()
    for part in _parts(modules):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(modules: Mapping[tuple[int, str], StoredLora]) -> Iterator[bytes]:
    for (layer, name), each in modules.items():
        yield f"{layer} {name} {each.a.shape} {each.b.shape} {each.scale!r}".encode()
        yield each.a.tobytes()
        yield each.b.tobytes()
