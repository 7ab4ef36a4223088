"""A model directory in Hugging Face's form: what its files say, and which of them are refused.

Owns config.json, generation_config.json, tokenizer_config.json, the chat template and the list of weight files.
Reads no code and no pickle, ever. Refuses to know how the weights are computed with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ModelFormatError
from headway.modelfile import sampling
from headway.modelfile.families import check_architecture
from headway.modelfile.packed_int4 import PackedInt4
from headway.modelfile.safetensors import WITH_WORDS, RawTensor, SafetensorsFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups

Json = dict[str, object]

_MAX_JSON_BYTES = 1 << 24
_MAX_TOKENIZER_BYTES = 1 << 28
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Sizes beyond these are mistakes or attacks: they would only turn into memory.
_LIMITS = {
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """Everything but the weights, read and checked; `shards` exist and are safetensors by name."""

    path: Path
    config: Json
    tokenizer: Path
    shards: tuple[Path, ...]
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]
    sampling: Mapping[str, float]  # what generation_config.json recommends
    packed: PackedInt4 | None = None  # how matrices were rounded; None: they were not

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Every weight by name, float32, one at a time."""
        if self.packed is None:
            for file, name in self._stored():
                yield name, file.data(name)
            return
        from headway.modelfile.groups import Groups  # brings numpy: only when a tensor is touched

        for name, tensor in self.grouped():
            yield name, tensor.floats() if isinstance(tensor, Groups) else tensor

    def grouped(self) -> Iterator[tuple[str, npt.NDArray[np.float32] | Groups]]:
        """As `tensors`, but a matrix that is stored in 4-bit groups comes as those."""
        if self.packed is None:
            yield from self.tensors()
            return
        found = {name: file for file, name in self._stored()}
        for name, tensor in self.packed.matrices(found):
            yield name, found[name].data(name) if isinstance(tensor, RawTensor) else tensor

    def raw_tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32] | RawTensor]]:
        """Every weight by name, in the format that it is stored in; one of 4 bits as float32."""
        if self.packed is not None:
            yield from self.tensors()
            return
        for file, name in self._stored():
            yield name, file.raw(name)

    def _stored(self) -> Iterator[tuple[SafetensorsFile, str]]:
        seen: set[str] = set()
        for shard in self.shards:
            file = SafetensorsFile(shard) if self.packed is None else SafetensorsFile(shard, WITH_WORDS)
            for name in file.tensors:
                if name in seen:
                    raise ModelFormatError(f"{shard} holds tensor {name!r}, which an earlier file holds as well")
                seen.add(name)
                if not self._is_ignored(name):
                    yield file, name

    def _is_ignored(self, name: str) -> bool:
        # Old checkpoints keep the rotary table as a weight, and some tied ones keep the embedding twice.
        is_tied_head = name == "lm_head.weight" and self.config.get("tie_word_embeddings") is True
        return name.endswith("rotary_emb.inv_freq") or is_tied_head


def read_directory(
    path: Path, architectures: Collection[str], family: str | None = None, *, has_weights: bool = True
) -> ModelDirectory:
    """Read the small files of a model directory; refuse what headway does not run.

    Without `has_weights` there need be none, and it has no shards.
    """
    config = _config(path, architectures, family)
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelFormatError(
            f"{path} has no tokenizer.json; save it there with transformers' AutoTokenizer.save_pretrained"
        )
    if tokenizer.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ModelFormatError(f"{tokenizer} has {tokenizer.stat().st_size} bytes; allowed: {_MAX_TOKENIZER_BYTES}")
    words = _json(path / "tokenizer_config.json") or {}
    generation = _json(path / "generation_config.json") or {}
    eos_token = _token(words.get("eos_token"))
    eos_ids = _ids(config.get("eos_token_id")) + _ids(generation.get("eos_token_id")) + _id_of(words, eos_token)
    return ModelDirectory(
        path=path,
        config=config,
        tokenizer=tokenizer,
        shards=_shards(path) if has_weights else (),
        chat_template=_chat_template(path, words),
        bos_token=_token(words.get("bos_token")),
        eos_token=eos_token,
        eos_ids=tuple(sorted(set(eos_ids))),
        sampling=sampling.of_directory(generation),
        packed=_packed(path, config),
    )


def _packed(path: Path, config: Json) -> PackedInt4 | None:
    settings = config.get("quantization_config")
    return None if settings is None else PackedInt4.read(f"{path}/config.json", settings)


def _config(path: Path, architectures: Collection[str], family: str | None) -> Json:
    config = _json(path / "config.json")
    if config is None:
        raise ModelFormatError(
            f"{path} has no config.json; a model directory holds config.json, tokenizer.json and *.safetensors"
        )
    if "auto_map" in config:
        raise ModelFormatError(f"{path}/config.json names code to run (auto_map); headway runs no code of a model")
    names = config.get("architectures")
    found = names[0] if isinstance(names, list) and len(names) == 1 else names
    check_architecture(f"{path}/config.json", found, architectures, family)
    for key, most in _LIMITS.items():
        value = config.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise ModelFormatError(f"{path}/config.json: {key} is {value!r}; allowed: 1 to {most}")
    return _with_rope(config)


def _with_rope(config: Json) -> Json:
    """Newer configs keep `rope_theta` and the scaling together in `rope_parameters`; give both spellings one form."""
    joined = config.get("rope_parameters")
    if not isinstance(joined, dict):
        return config
    scaling = {key: value for key, value in joined.items() if key != "rope_theta"}
    is_plain = scaling.get("rope_type", "default") == "default"
    theta = joined.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**config, "rope_theta": theta, "rope_scaling": None if is_plain else scaling}


def _shards(path: Path) -> tuple[Path, ...]:
    index = _json(path / "model.safetensors.index.json")
    if index is not None:
        files = index.get("weight_map")
        names = set(files.values()) if isinstance(files, dict) else set()
        if not names or not all(isinstance(name, str) and _is_plain_name(name) for name in names):
            raise ModelFormatError(f"{path}/model.safetensors.index.json does not map tensors to files beside it")
        shards = tuple(sorted(path / str(name) for name in names))
        for shard in shards:
            if not shard.is_file():
                raise ModelFormatError(f"{shard} is missing; model.safetensors.index.json names it")
        return shards
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    shards = tuple(sorted(path.glob("*.safetensors")))
    if shards:
        return shards
    pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
    if pickles:
        raise ModelFormatError(
            f"{path} holds its weights only as {pickles[0]}, a pickle, which can run code when it is read; "
            "convert it to safetensors with transformers' save_pretrained"
        )
    raise ModelFormatError(f"{path} has no weights: looked for model.safetensors.index.json and *.safetensors")


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and "\\" not in name and "\0" not in name


def _chat_template(path: Path, words: Json) -> str | None:
    own = path / "chat_template.jinja"
    if own.is_file():
        return _bytes(own, _MAX_JSON_BYTES).decode("utf-8", "replace")
    found = words.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(value: object) -> str | None:
    """A special token is written as its text, or as an object that holds the text."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if type(item) is int and item >= 0)


def _id_of(words: Json, token: str | None) -> tuple[int, ...]:
    known = words.get("added_tokens_decoder")
    if token is None or not isinstance(known, dict):
        return ()
    return tuple(int(key) for key, entry in known.items() if key.isdecimal() and _token(entry) == token)


def _json(path: Path) -> Json | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(_bytes(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is not a JSON object")
    return value


def _bytes(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise ModelFormatError(f"cannot read {path}: {error}") from None
    if len(raw) > most:
        raise ModelFormatError(f"{path} has more than {most} bytes; no real one is that large")
    return raw
