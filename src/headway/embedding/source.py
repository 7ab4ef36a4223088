"""Which model makes vectors of texts, and how: its files, its tokenizer, how token vectors become one.

Reads directories in Hugging Face's form, those of sentence-transformers included. Importing it brings neither numpy nor
torch: the API process reads here what the worker will compute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, ModelFormatError
from headway.modelfile.cache import ModelCache
from headway.modelfile.directory import ModelDirectory, read_directory
from headway.modelfile.pull import pulled
from headway.modelfile.source import ModelSource, resolve
from headway.models.encoder_spec import ENCODERS, is_encoder

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """A model that makes vectors: an encoder's directory, or a decoder whose last vectors are pooled."""

    name: str
    tokenizer: Path
    pooling: str  # mean, cls or last
    max_tokens: int | None  # as its authors say; None: what the model has positions for
    encoder: ModelDirectory | None
    decoder: ModelSource | None


def open_embedding_source(model: str, cache: ModelCache) -> EmbeddingSource:
    """Find and check the model that `--embedding-model` names."""
    path = pulled(model, cache) or Path(model).expanduser()
    config = _json(path / "config.json") if path.is_dir() else {}
    try:
        pooling = _pooling(path) if path.is_dir() else None
        if is_encoder(config):
            found = read_directory(path, ENCODERS)
            name, most = path.resolve().name, _max_tokens(path)
            return EmbeddingSource(name, found.tokenizer, pooling or "mean", most, found, None)
        source = resolve(model, cache)
    except (ConfigError, ModelFormatError) as error:
        raise ConfigError(f"embedding_model is {model!r}: {error}; encoders: {', '.join(ENCODERS)}") from None
    most = _max_tokens(path) if path.is_dir() else None
    return EmbeddingSource(source.name, source.tokenizer_path(), pooling or "last", most, None, source)


def _pooling(path: Path) -> str | None:
    """What the sentence-transformers files of a directory say; None where there are none."""
    modules = path / "modules.json"
    if not modules.is_file():
        return None
    listed = _read(modules)
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    known, found = ("Transformer", "Pooling", "Normalize"), None
    for entry in entries:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        if kind not in known:
            raise ModelFormatError(f"{modules} has a module {kind!r}; allowed: {', '.join(known)}")
        if kind == "Pooling":
            found = _kind_of(path / str(entry.get("path", "")) / "config.json")
    return found


def _kind_of(file: Path) -> str:
    modes = [key for key, value in _json(file).items() if key.startswith("pooling_mode") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelFormatError(
            f"{file} has the modes {', '.join(modes) or 'none'}; allowed: one of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _max_tokens(path: Path) -> int | None:
    most = _json(path / "sentence_bert_config.json").get("max_seq_length")
    return most if type(most) is int and most > 0 else None


def _json(path: Path) -> dict[str, object]:
    """The object in a file; an empty one where there is no such file."""
    found = _read(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"cannot read {path}: {error}") from None
