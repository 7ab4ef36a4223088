"""GGUF files made byte by byte, right or wrong on purpose."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, values: Sequence[object]) -> bytes:
    head = struct.pack("<IQ", kind, len(values))
    if kind == STRING:
        return head + b"".join(string(str(value)) for value in values)
    return head + struct.pack(f"<{len(values)}{FORMS[kind]}", *values)


def value(item: object) -> bytes:
    """Type code and bytes of a Python value, in the types llama.cpp's converter chooses."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    assert isinstance(item, list)
    kind = STRING if item and isinstance(item[0], str) else F32 if item and isinstance(item[0], float) else I32
    return struct.pack("<I", ARRAY) + array(kind, item)


@dataclass
class Entry:
    """One row of the tensor table, as written: nothing says it is true."""

    name: str
    dims: Sequence[int]  # fastest first, as in the file
    kind: int
    offset: int


@dataclass
class Draft:
    """The parts of a file; `build` joins them."""

    version: int = 3
    pairs: list[tuple[str, bytes]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    payload: bytes = b""
    num_pairs: int | None = None  # what the header says; the truth if None
    num_entries: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        out = b"GGUF" + struct.pack("<IQQ", self.version, num_entries, num_pairs)
        out += b"".join(string(key) + raw for key, raw in self.pairs)
        for entry in self.entries:
            dims = struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims)
            out += string(entry.name) + dims + struct.pack("<IQ", entry.kind, entry.offset)
        return out + bytes(-len(out) % self.alignment) + self.payload


def draft(metadata: Mapping[str, object], tensors: Mapping[str, np.ndarray]) -> Draft:
    """A right file: float32 tensors one after the other."""
    made = Draft(pairs=[(key, value(item)) for key, item in metadata.items()])
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor, dtype="<f4").tobytes()
        made.entries.append(Entry(name, tuple(reversed(tensor.shape)), 0, len(made.payload)))
        made.payload += raw + bytes(-len(raw) % made.alignment)
    return made


def write(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, np.ndarray]) -> Path:
    path.write_bytes(draft(metadata, tensors).build())
    return path


def tiny_model(
    arch: str = "llama", layers: int = 2, tied: bool = True, head_dim: int = 4
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Metadata and random tensors of a decoder of width 16 with 4 heads, 2 KV heads and 32 tokens."""
    rng = np.random.default_rng(7)
    width, inner, vocab, heads, kv_heads = 16, 24, 32, 4, 2
    metadata: dict[str, object] = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": width,
        f"{arch}.feed_forward_length": inner,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|end|>", *(chr(0x61 + i) for i in range(26)), "ab", "abc", "<b>", "Ġ", "Ġa"],
        "tokenizer.ggml.token_type": [3, *([1] * 28), 3, 1, 1],
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 29,
        "tokenizer.ggml.eos_token_id": 0,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    for layer in range(layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (heads * head_dim, width),
            "attn_k.weight": (kv_heads * head_dim, width),
            "attn_v.weight": (kv_heads * head_dim, width),
            "attn_output.weight": (width, heads * head_dim),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (inner, width),
            "ffn_up.weight": (inner, width),
            "ffn_down.weight": (width, inner),
        }
        if arch == "qwen2":
            parts |= {"attn_q.bias": (16,), "attn_k.bias": (8,), "attn_v.bias": (8,)}
        if arch == "qwen3":
            parts |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return metadata, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
