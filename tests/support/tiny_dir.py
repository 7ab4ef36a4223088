"""A whole model directory that fits in a few hundred kilobytes: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.numpy import save_file
from tokenizers import AddedToken

from headway.models.spec import ModelSpec
from tiny_models import random_tensors, tiny_spec
from vocabularies import byte_level

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def write_tiny_model(
    folder: Path, max_len: int = 512, template: str = TEMPLATE, marks: Sequence[str] = ()
) -> ModelSpec:
    """Write it; the vocabulary is bytes, a few merges and `marks`, and token 263 ends an answer."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    spec = tiny_spec(vocab_size=tokenizer.get_vocab_size(), max_len=max_len)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_tensors(spec), folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_len,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<end>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return spec


def tiny_options(folder: Path, **changes: object) -> dict[str, object]:
    """For an `LLM` on what `write_tiny_model` wrote: one thread, little memory, a cache of its own."""
    return {"model": str(folder), "cache_dir": str(folder / "cache"), "num_blocks": 400, "threads": 1, **changes}
