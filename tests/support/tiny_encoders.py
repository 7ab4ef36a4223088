"""Whole directories of tiny random encoders, saved by transformers, with a WordPiece tokenizer and pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = ["a", "cat", "kitten", "train", "waits", "never", "the", "vehicle", "headway", "##s", "##ing", "b", "c", "d"]
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 96,
}


def tiny_encoder(kind: str = "bert") -> torch.nn.Module:
    """A random model of that kind, in evaluation mode; weights and norms are far from their initial values."""
    torch.manual_seed(11)
    made = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False),
        "roberta": lambda: transformers.RobertaModel(
            transformers.RobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1), add_pooling_layer=False
        ),
    }[kind]()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    eval_mode: torch.nn.Module = made.eval()
    return eval_mode


def write_tiny_encoder(
    folder: Path, kind: str = "bert", pooling: str = "mean_tokens", max_tokens: int = 64
) -> torch.nn.Module:
    """Write what `--embedding-model` takes, and return the model."""
    model = tiny_encoder(kind)
    model.save_pretrained(folder)
    ids = {token: at for at, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    inner.save(str(folder / "tokenizer.json"))
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in parts.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    return model
