"""Sizes of encoders, as their config.json says them. It imports no numpy: the API process reads configs too."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ModelFormatError
from headway.models.spec import MAX_HEADS, MAX_LAYERS, MAX_LEN, MAX_VOCAB, Config, read_int, read_real

ENCODERS = ("BertModel", "RobertaModel", "XLMRobertaModel")
"""Architectures that `read_encoder` takes."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes of an encoder; heads divide its width."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_len: int
    norm_eps: float
    first_position: int  # row of the position table that the first token takes

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def is_encoder(config: Config) -> bool:
    """Whether a config.json is that of an encoder."""
    return any(name in ENCODERS for name in _architectures(config))


def read_encoder(config: Config) -> EncoderSpec:
    """The spec of a config.json; ModelFormatError for what is computed otherwise."""
    for key, allowed in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if config.get(key, allowed) != allowed:
            raise ModelFormatError(f"the model's config has {key} = {config[key]!r}; allowed: {allowed}")
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads", top=MAX_HEADS)
    if hidden % heads or hidden // heads % 2:
        raise ModelFormatError(f"hidden_size {hidden} does not divide into {heads} heads of even size")
    first = (
        0
        if "BertModel" in _architectures(config)
        else 1 + read_int({"pad_token_id": 1, **config}, "pad_token_id", top=MAX_LEN)
    )
    length = read_int(config, "max_position_embeddings", top=MAX_LEN) - first
    if length < 2:
        raise ModelFormatError(f"the position table leaves {length} tokens behind its first {first} rows; needed: 2")
    return EncoderSpec(
        vocab_size=read_int(config, "vocab_size", top=MAX_VOCAB),
        hidden=hidden,
        intermediate=read_int(config, "intermediate_size"),
        layers=read_int(config, "num_hidden_layers", top=MAX_LAYERS),
        heads=heads,
        max_len=length,
        norm_eps=read_real(config, "layer_norm_eps", 1e-12, top=1.0),
        first_position=first,
    )


def _architectures(config: Config) -> list[object]:
    named = config.get("architectures")
    return list(named) if isinstance(named, list | tuple) else []
