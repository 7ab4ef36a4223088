"""The frozen configuration tree: one place, a default and a one-line meaning per field.

It validates and never derives: whatever depends on the machine or on the model is computed in `build`.
It reads no environment; `cli` alone maps flags, variables and files onto these fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from headway.config_ray import RayConfig
from headway.config_text import parse_adapters, parse_batching, parse_shares, require
from headway.errors import ConfigError
from headway.request_limits import LIMITS

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "int8", "q4", "fp8", "float16")
KV_DTYPES = ("auto", "float32", "fp16", "int8", "fp8")
DEVICES = ("cpu", "cuda")
ROLES = ("prefill", "decode", "both")
KERNELS = ("auto", "native", "ref", "native-generic", "native-avx2", "native-avx512", "native-avx512vnni")
MOST_GB = 1_000_000  # far beyond any machine, and still a number of bytes

CHOICES = {
    "prefill_order": ("shortest", "arrival"),
    "kv_admission": ("optimistic", "peak", "reserve"),
    "victims": ("least-recompute", "last-come"),
    "speculation": ("auto", "off", "suffix", "model"),
}
"""What the scheduler's fields of words allow."""

_ORIGIN = re.compile(r"https?://[^\s/,*]+")
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, in which form, on what."""

    model: str = DEFAULT_MODEL
    """A bundled name, a .gguf file, or a directory with config.json, safetensors and tokenizer.json."""
    served_model_name: str | None = None
    """The name clients use; the model's own name if not given."""
    dtype: str = "auto"
    """Number format of the weights: float32, bfloat16, int8 or q4 (CUDA: float32, bfloat16, float16 or fp8); auto is
    the fastest whose quality holds."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, or a backend of your own as my.module:Thing."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; the model's own context if not given."""
    threads: int | None = None
    """Compute threads; the number of usable cores if not given."""
    kernels: str = "auto"
    """auto: native where installed; native-avx2 and such: one instruction level; ref: torch; or my.module:load."""
    cache_dir: str | None = None
    """Where converted models are kept; ~/.cache/headway if not given."""
    cache_limit_gb: float = 20.0
    """Gigabytes that converted models may take there; those not used for longest are removed, those in use never."""
    dummy_weights: bool = False
    """Compute with made-up weights, for measuring speed; the model gives its sizes, tokenizer and template alone."""
    model_family: str | None = None
    """A family of your own, as my.module or my.module:Thing; see docs/adding-a-model.md."""
    model_shape: str | None = None
    """With dummy_weights: the sizes of a well-known model, such as llama-3.1-8b, instead of the model's own."""
    tensor_parallel: int = 1
    """Processes that compute one model together, each some columns of every product; the tokens are the same."""

    adapter: tuple[str, ...] = ()
    """A LoRA adapter to serve, as NAME=PATH of a directory that PEFT saved; may be given several times."""
    adapter_memory_gb: float = 1.0
    """Gigabytes that adapters may take in memory, all of them together."""

    def __post_init__(self) -> None:
        parse_adapters(self.adapter)
        require(0 <= self.adapter_memory_gb < 1e6, "adapter_memory_gb", self.adapter_memory_gb, "0 or more")
        has_shape = self.model_shape is None or self.dummy_weights
        require(has_shape, "model_shape", self.model_shape, "none, unless dummy_weights is set")
        require(bool(self.model), "model", self.model, "a bundled name, a .gguf file or a directory")
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        is_known = self.device in DEVICES or ":" in self.device
        require(is_known, "device", self.device, f"{', '.join(DEVICES)} or my.module:Thing")
        is_known = self.kernels in KERNELS or ":" in self.kernels
        require(is_known, "kernels", self.kernels, f"{', '.join(KERNELS)} or my.module:load")
        require(0 <= self.cache_limit_gb < 1e9, "cache_limit_gb", self.cache_limit_gb, "0 or more")
        require(1 <= self.tensor_parallel <= 64, "tensor_parallel", self.tensor_parallel, "1 to 64")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "2 or more")


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
    kv_host_bytes: int = 0
    """Host memory in bytes for KV blocks that were computed once, beside the pool; 0: none."""
    kv_disk_bytes: int = 0
    """Disk space in bytes for them, which outlives the process; those not used for longest are removed. 0: none."""
    kv_disk_dir: str | None = None
    """Folder for kv_disk_bytes, which only its owner may look into; ~/.cache/headway-kv if not given."""
    touch_kv: bool = False
    """Take all memory of the KV pool at the start: no step waits for pages later."""
    debug_kv: bool = False
    """Check every read of the KV cache and fill released blocks with NaN: slow, for tests and the soak."""

    def __post_init__(self) -> None:
        # A block may hold a whole context: then the cache is contiguous, which is what paging is measured against.
        require(1 <= self.block_size <= 8192, "block_size", self.block_size, "1 to 8192")
        require(self.kv_dtype in KV_DTYPES, "kv_dtype", self.kv_dtype, ", ".join(KV_DTYPES))
        is_size = self.kv_memory_gb is None or 0 < self.kv_memory_gb <= MOST_GB
        require(is_size, "kv_memory_gb", self.kv_memory_gb, f"above 0, up to {MOST_GB}")
        require(self.num_blocks is None or self.num_blocks >= 1, "num_blocks", self.num_blocks, "1 or more")
        for name in ("kv_host_bytes", "kv_disk_bytes"):
            value = getattr(self, name)
            is_size = 0 <= value <= MOST_GB * 2**30 and (not value or self.prefix_caching)
            require(is_size, name, value, "0 (none) or a number of bytes, with prefix_caching")
        has_disk = self.kv_disk_dir is None or self.kv_disk_bytes > 0
        require(has_disk, "kv_disk_dir", self.kv_disk_dir, "none, unless kv_disk_bytes says how much")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run in a step, and how many tokens it carries."""

    policy: str = "fcfs"
    """Queue order: a name under headway.policies, or my.module:Thing."""
    policy_options: str = ""
    """Of the policy, such as beta=20,share_every=10; its file names them."""
    rank_state: str | None = None
    """Where policy ltr keeps what it has learned about answers' lengths: read at the start, written at the end."""
    rank_log: str | None = None
    """Write every answered request to this file, its prompt as token ids, for `headway rank fit`."""
    target_itl_ms: float | None = None
    """The one knob: milliseconds between two tokens; chunks and slots follow from the measured cost of steps."""
    max_num_seqs: int | None = None
    """Slots: requests that run at the same time; 64 if not given, 256 with target_itl_ms."""
    max_num_batched_tokens: int | None = None
    """Tokens one step may compute, decode rows included; 512 if not given, 2048 with target_itl_ms."""
    max_chunk_tokens: int | None = None
    """Longest prefill chunk of one request in one step; bounded by the step's tokens if not given."""
    prefill_order: str = "shortest"
    """Which of several prompts under way goes on first: shortest (every fourth chunk to the oldest) or arrival."""
    max_partial_prefills: int = 4
    """Prompts that may be under way although the step is full without them."""
    fair: bool = False
    """Share the service equally among tenants, over the policy's order within each."""
    tenant_weights: str = ""
    """Unequal shares with fair, such as ann=2,bob=1; a tenant that is not named has 1."""
    lanes: str = ""
    """Guaranteed shares by kind of request, the most urgent first, such as interactive=80,batch=20."""
    kv_admission: str = "optimistic"
    """Memory a request must find: optimistic (its prompt), peak (all expected answers) or reserve (the longest)."""
    victims: str = "least-recompute"
    """Which request is preempted when memory runs out: least-recompute or last-come."""
    max_preemptions: int = 3
    """How often one request may be preempted; then it is protected. 0: all it can ever need is reserved."""
    swap_space_gb: float = 0.0
    """Host memory for the KV of preempted requests, used where copying is cheaper than computing again."""
    batching: str = "continuous"
    """continuous, or a baseline to compare with: naive, static:8, dynamic:8 or dynamic:8,window=50,buckets (ms)."""
    depth: int | None = None
    """Plans under way at once: 1 waits for each step, 2 plans the next one meanwhile; 1 if not given, 2 on a GPU."""
    speculation: str = "auto"
    """Guess tokens ahead: off, suffix (by what followed before), model (by draft_model); auto: either, on a CPU."""
    draft_model: str | None = None
    """A small model with the vocabulary of the model, to guess tokens: a name, a .gguf file or a directory."""
    max_draft_tokens: int = 8
    """Most tokens that are guessed ahead for one request in one step."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused at once."""
    role: str = "both"
    """prefill computes prompts, decode goes on with their KV, both does all; one for all replicas, or with commas."""
    step_log: str | None = None
    """Write every scheduling event to this file, one JSON object per line."""

    def __post_init__(self) -> None:
        require(bool(self.policy), "policy", self.policy, "a policy's name or my.module:Thing")
        require(self.target_itl_ms is None or self.target_itl_ms > 0, "target_itl_ms", self.target_itl_ms, "above 0")
        require(self.max_num_seqs is None or self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "1 or more")
        rule = f"max_num_seqs ({self.num_slots}) or more, so that every running request advances in every step"
        require(self.num_tokens >= self.num_slots, "max_num_batched_tokens", self.num_tokens, rule)
        fits = self.max_chunk_tokens is None or self.max_chunk_tokens >= 1
        require(fits, "max_chunk_tokens", self.max_chunk_tokens, "1 or more")
        for name, allowed in CHOICES.items():
            require(getattr(self, name) in allowed, name, getattr(self, name), ", ".join(allowed))
        parse_batching(self.batching)
        require(self.max_partial_prefills >= 1, "max_partial_prefills", self.max_partial_prefills, "1 or more")
        require(self.max_preemptions >= 0, "max_preemptions", self.max_preemptions, "0 or more")
        require(0 <= self.swap_space_gb <= MOST_GB, "swap_space_gb", self.swap_space_gb, f"0 to {MOST_GB}")
        for name in ("tenant_weights", "lanes"):
            parse_shares(getattr(self, name), name)
        is_known = all(role in ROLES for role in self.role.split(","))
        require(is_known, "role", self.role, f"{', '.join(ROLES)}; one, or one for each replica with commas")
        require(1 <= self.num_plans <= 3, "depth", self.depth, "1, 2 or 3")
        require(1 <= self.max_draft_tokens <= 32, "max_draft_tokens", self.max_draft_tokens, "1 to 32")
        require(self.max_waiting >= 1, "max_waiting", self.max_waiting, "1 or more")

    @property
    def num_slots(self) -> int:
        """Slots, given or by default."""
        return self.max_num_seqs or (64 if self.target_itl_ms is None else 256)

    @property
    def num_plans(self) -> int:
        """Plans under way at once, given or not."""
        return 1 if self.depth is None else self.depth

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, given or by default."""
        return self.max_num_batched_tokens or max(self.num_slots, 512 if self.target_itl_ms is None else 2048)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are chosen where a request does not say; without these, as the model's authors recommend."""

    default_temperature: float | None = None
    """Temperature where a request names none; the model's recommendation, else 1, if not given."""
    default_top_p: float | None = None
    """Likewise top_p; else 1."""
    default_top_k: int | None = None
    """Likewise top_k; else 0, which is off."""
    default_min_p: float | None = None
    """Likewise min_p; else 0."""
    default_repetition_penalty: float | None = None
    """Likewise repetition_penalty; else 1."""
    default_max_tokens: int | None = None
    """Most tokens of an answer where a request names no number; 1024, 16 on /v1/completions, if not given."""

    def __post_init__(self) -> None:
        for name, low, high, allowed in (  # the ranges that a request's own fields have
            ("default_temperature", 0.0, 2.0, "0 to 2"),
            ("default_top_p", 1e-9, 1.0, "above 0, up to 1"),
            ("default_top_k", 0, 2**31, "0 (off) or more"),
            ("default_min_p", 0.0, 1.0, "0 to 1"),
            ("default_repetition_penalty", 1e-6, 10.0, "0.000001 to 10"),
            ("default_max_tokens", 1, 2**31, "1 or more"),
        ):
            value = getattr(self, name)
            require(value is None or low <= value <= high, name, value, allowed)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs; `LLM` and the engine process are built from it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @staticmethod
    def of(**values: Any) -> EngineConfig:
        """Build the tree from flat field names: `EngineConfig.of(model="x.gguf", block_size=32)`."""
        parts: dict[str, Any] = {}
        kinds = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "sampling": SamplingConfig}
        for name, kind in kinds.items():
            known = {f.name for f in fields(kind)} & values.keys()
            parts[name] = kind(**{key: values.pop(key) for key in known})
        if values:
            known_names = sorted(f.name for kind in kinds.values() for f in fields(kind))
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
    """If given, every route but /health, /ready and the page /docs asks for it as a bearer token."""
    keys: str | None = None
    """A TOML file of API keys by tenant, each with a weight and limits; read again on SIGHUP. Instead of api_key."""
    embedding_model: str | None = None
    """A second model, for /v1/embeddings, /v1/score and /v1/rerank: a directory or a .gguf file; none if not given."""
    trust_user: bool = False
    """The field user of a request tells the truth: cached prefixes are shared within one user only."""
    shared_cache: bool = False
    """Share cached prefixes among all tenants: faster where prompts are alike, and it tells who asked them before."""
    cache_secret: str | None = None
    """A file with the secret that keeps tenants' cached prefixes apart; one in the cache folder if not given."""
    cors_origins: str = ""
    """Web pages that may call this server from a browser: origins such as https://a.example,http://b:3000, or *."""
    allowed_hosts: str = ""
    """More names by which clients may call this server, such as llm.example,llm.svc, or *; addresses always may."""
    tls_cert: str | None = None
    """File with the certificate for HTTPS, and those it was signed with, in PEM; without it the server speaks HTTP."""
    tls_key: str | None = None
    """File with the certificate's key, in PEM and without a password; not needed if it is in tls_cert."""
    max_connections: int | None = None
    """Most open connections; 4096, or what the limit of open files leaves, if not given."""
    max_connections_per_ip: int | None = None
    """Most open connections from one address; three quarters of max_connections if not given."""
    max_body_bytes: int = LIMITS.body_bytes
    """Largest request body."""
    strict_fields: bool = False
    """Refuse requests with fields that are not understood; without it they are ignored and named in the response."""
    max_n: int = LIMITS.n
    """Most answers to one prompt."""
    max_prompts: int = LIMITS.prompts
    """Most prompts in one /v1/completions request."""
    max_queue_s: float = 10.0
    """Longest predicted wait of a request before its first step; one that would wait longer is refused at once."""
    admin_socket: str | None = None
    """Path of a unix socket whose GET and PATCH /config show and change the running scheduler; none if not given."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """Log lines, of which every request has one: text, or json with one object per line."""
    otlp_endpoint: str | None = None
    """A collector for OpenTelemetry traces over HTTP, such as http://localhost:4318; none if not given."""
    shutdown_grace_s: float = 30.0
    """How long SIGTERM lets running requests finish."""
    replicas: int = 1
    """Engines on this machine, each with its share of the cores; requests are routed to them, and go on in another."""
    route: str = "cost"
    """Which replica gets a request: cost, least_loaded, round_robin, session, or my.module:Thing."""
    listen_engines: str | None = None
    """HOST:PORT at which engines of other machines join (headway engine --join); none do if not given."""
    engine_key: str | None = None
    """The key that such engines must have; better in HEADWAY_ENGINE_KEY or a file than in a command line."""
    engine_key_file: str | None = None
    """A file with that key. Without one engines can join from this machine only."""
    resume: bool = True
    """Go on with begun answers, token for token, when the engine process is replaced; else they end in an error."""
    stall_s: float = 3.0
    """Replace an engine process that makes no progress for so long, thrice as long if it computes; 0: never."""

    def __post_init__(self) -> None:
        # An empty variable is mostly a mistake, and which one cannot be told: no key, or one that was not filled in.
        has_key = self.api_key is None or bool(self.api_key.strip())
        require(has_key, "api_key", self.api_key, "a key, or leave it out (unset HEADWAY_API_KEY) to ask for none")
        is_one = self.api_key is None or self.keys is None
        require(is_one, "keys", self.keys, "none beside api_key; put that key in the file")
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        require(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "1024 or more")
        is_some = 1 <= self.replicas <= 64 or (self.replicas == 0 and self.listen_engines is not None)
        require(is_some, "replicas", self.replicas, "1 to 64; 0 with listen_engines, where all engines join")
        require(1 <= self.max_n <= 128, "max_n", self.max_n, "1 to 128")
        require(0 <= self.max_queue_s < 1e9, "max_queue_s", self.max_queue_s, "seconds, 0 or more")
        require(1 <= self.max_prompts <= 2048, "max_prompts", self.max_prompts, "1 to 2048")
        levels = ("debug", "info", "warning", "error")
        require(self.log_level in levels, "log_level", self.log_level, ", ".join(levels))
        require(self.log_format in ("text", "json"), "log_format", self.log_format, "text, json")
        is_known = self.cors_origins == "*" or all(map(_ORIGIN.fullmatch, self.origins))
        allowed = "* or origins such as https://app.example,http://localhost:3000"
        require(is_known, "cors_origins", self.cors_origins, allowed)
        is_known = self.allowed_hosts == "*" or all(map(_HOST.fullmatch, self.hosts))
        require(is_known, "allowed_hosts", self.allowed_hosts, "* or names without a port, such as llm.example,llm.svc")
        require(
            self.tls_key is None or self.tls_cert is not None, "tls_key", self.tls_key, "none, unless tls_cert is given"
        )
        for name in ("max_connections", "max_connections_per_ip"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more")
        is_url = self.otlp_endpoint is None or bool(_ORIGIN.fullmatch(self.otlp_endpoint.rstrip("/")))
        require(is_url, "otlp_endpoint", self.otlp_endpoint, "http://HOST:PORT, to which /v1/traces is added")
        require(0 <= self.stall_s <= 3600, "stall_s", self.stall_s, "0 (off) to 3600")
        require(self.shutdown_grace_s >= 0, "shutdown_grace_s", self.shutdown_grace_s, "0 or more")

    @property
    def asks_for_key(self) -> bool:
        """True if requests need a key."""
        return self.api_key is not None or self.keys is not None

    @property
    def origins(self) -> list[str]:
        """The origins of `cors_origins`, one by one."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]

    @property
    def hosts(self) -> list[str]:
        """The names of `allowed_hosts`, one by one."""
        return [host.strip().lower() for host in self.allowed_hosts.split(",") if host.strip()]


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `headway serve` runs: an engine and the server in front of it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
