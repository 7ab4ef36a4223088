"""The frozen configuration tree: one place, a default and a one-line meaning per field.

It validates and never derives: whatever depends on the machine or on the model is computed in `build`.
It reads no environment; `cli` alone maps flags, variables and files onto these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from headway.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "int8", "q4")
KV_DTYPES = ("auto", "float32", "fp16", "int8")
DEVICES = ("cpu",)
KERNELS = ("auto", "native", "ref", "native-generic", "native-avx2", "native-avx512", "native-avx512vnni")


def _require(ok: bool, name: str, got: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {got!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, in which form, on what."""

    model: str = DEFAULT_MODEL
    """A bundled name, a .gguf file, or a directory with config.json, safetensors and tokenizer.json."""
    served_model_name: str | None = None
    """The name clients use; the model's own name if not given."""
    dtype: str = "auto"
    """Number format of the weights: float32, bfloat16, int8 or q4; auto is the fastest whose quality holds."""
    device: str = "cpu"
    """Where the model runs."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; the model's own context if not given."""
    threads: int | None = None
    """Compute threads; the number of usable cores if not given."""
    kernels: str = "auto"
    """auto takes the native kernels where installed, native-avx2 and such one instruction level; ref is torch."""
    cache_dir: str | None = None
    """Where converted models are kept; ~/.cache/headway if not given."""

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "a bundled name, a .gguf file or a directory")
        _require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        _require(self.device in DEVICES, "device", self.device, ", ".join(DEVICES))
        _require(self.kernels in KERNELS, "kernels", self.kernels, ", ".join(KERNELS))
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")
        _require(
            self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "2 or more"
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per block."""
    kv_dtype: str = "auto"
    """Number format of keys and values: float32, fp16 or int8; auto is fp16 beside quantized weights."""
    kv_memory_gb: float | None = None
    """Memory for the KV pool in GiB; a quarter of the free memory, at most 2, if not given."""
    num_blocks: int | None = None
    """Number of blocks, overriding kv_memory_gb."""
    prefix_caching: bool = True
    """Keep finished blocks and share equal prefixes."""
    touch_kv: bool = False
    """Take all memory of the KV pool at the start: no step waits for pages later."""

    def __post_init__(self) -> None:
        # A block may hold a whole context: then the cache is contiguous, which is what paging is measured against.
        _require(1 <= self.block_size <= 8192, "block_size", self.block_size, "1 to 8192")
        _require(self.kv_dtype in KV_DTYPES, "kv_dtype", self.kv_dtype, ", ".join(KV_DTYPES))
        _require(self.kv_memory_gb is None or self.kv_memory_gb > 0, "kv_memory_gb", self.kv_memory_gb, "above 0")
        _require(self.num_blocks is None or self.num_blocks >= 1, "num_blocks", self.num_blocks, "1 or more")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step, and how much."""

    policy: str = "fcfs"
    """Queue order: a name under headway.policies, or my.module:Thing."""
    max_num_seqs: int = 64
    """Seats: requests that run at the same time."""
    max_num_batched_tokens: int = 512
    """Tokens one step may compute, decode rows included."""
    max_chunk_tokens: int | None = None
    """Longest prefill chunk of one request in one step; bounded by the step's tokens if not given."""
    depth: int = 1
    """Plans under way at once: 1 waits for each step, 2 plans the next one meanwhile."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused at once."""
    step_log: str | None = None
    """Write every scheduling event to this file, one JSON object per line."""

    def __post_init__(self) -> None:
        _require(bool(self.policy), "policy", self.policy, "a policy's name or my.module:Thing")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "1 or more")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"max_num_seqs ({self.max_num_seqs}) or more, so that every running request advances in every step",
        )
        _require(
            self.max_chunk_tokens is None or self.max_chunk_tokens >= 1,
            "max_chunk_tokens",
            self.max_chunk_tokens,
            "1 or more",
        )
        _require(1 <= self.depth <= 3, "depth", self.depth, "1, 2 or 3")
        _require(self.max_waiting >= 1, "max_waiting", self.max_waiting, "1 or more")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs; `LLM` and the engine process are built from it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @staticmethod
    def of(**values: Any) -> EngineConfig:
        """Build the tree from flat field names: `EngineConfig.of(model="x.gguf", block_size=32)`."""
        parts: dict[str, Any] = {}
        for name, kind in (("model", ModelConfig), ("cache", CacheConfig), ("scheduler", SchedulerConfig)):
            known = {f.name for f in fields(kind)} & values.keys()
            parts[name] = kind(**{key: values.pop(key) for key in known})
        if values:
            known_names = sorted(f.name for kind in (ModelConfig, CacheConfig, SchedulerConfig) for f in fields(kind))
            raise ConfigError(f"unknown option {sorted(values)[0]!r}; allowed: {', '.join(known_names)}")
        return EngineConfig(**parts)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """If given, every route but /health and /ready asks for it as a bearer token."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body."""
    max_n: int = 16
    """Most answers to one prompt."""
    max_prompts: int = 64
    """Most prompts in one /v1/completions request."""
    log_level: str = "info"
    """debug, info, warning or error."""
    shutdown_grace_s: float = 30.0
    """How long SIGTERM lets running requests finish."""

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        _require(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "1024 or more")
        _require(1 <= self.max_n <= 128, "max_n", self.max_n, "1 to 128")
        _require(1 <= self.max_prompts <= 2048, "max_prompts", self.max_prompts, "1 to 2048")
        levels = ("debug", "info", "warning", "error")
        _require(self.log_level in levels, "log_level", self.log_level, ", ".join(levels))
        _require(self.shutdown_grace_s >= 0, "shutdown_grace_s", self.shutdown_grace_s, "0 or more")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `headway serve` runs: an engine and the server in front of it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
