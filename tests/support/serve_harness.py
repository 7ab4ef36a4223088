"""A real server on a free port over an `EchoEngine`, for tests: own thread, own event loop, real HTTP.

The vocabulary is the 256 bytes, shifted by one, and an end token 0; greedy answers repeat the prompt.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from echo_engine import EchoEngine
from headway.config import ServerConfig
from headway.engine.local import LocalClient
from headway.grammar.check import GrammarChecker
from headway.serve.server import DrainingServer, listen, url_of
from headway.serve.service import ServedModel, Service
from headway.serve.tenants import Tenants
from headway.text.chat import ChatTemplate
from headway.text.defaults import SamplingDefaults
from headway.text.tokenizer import Tokenizer

T = TypeVar("T")

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('not with me') }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token id = 1 + byte; 0 is the end token."""
    return Tokenizer(byte_vocabulary())


def byte_vocabulary() -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}
    assert set(chars.values()) == set(alphabet)
    inner = tokenizers.Tokenizer(models.BPE(vocab={"<|end|>": 0, **{chars[b]: b + 1 for b in range(256)}}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner


def model_directory(path: Path) -> Path:
    """Just enough of a model for the API process, which reads no weights."""
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 257,
        "max_position_embeddings": 100_000,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    byte_vocabulary().save(str(path / "tokenizer.json"))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    return path


class Harness:
    """A running server; `do` runs a coroutine in its event loop."""

    def __init__(
        self,
        engine: EchoEngine,
        config: ServerConfig,
        name: str = "echo",
        defaults: SamplingDefaults | None = None,
        template: str = TEMPLATE,
        home: Path = Path("/nonexistent"),
        tokenizer: Tokenizer | None = None,
        grammars: GrammarChecker | None = None,
    ) -> None:
        self._tokenizer = tokenizer or byte_tokenizer()
        self._grammars = grammars
        self.engine = engine
        self.home = home  # where the secret of the cache is kept, if there is one
        self._defaults = defaults or SamplingDefaults()
        self.template = ChatTemplate(template)
        self.name = name
        self.config = config
        self.url = ""
        self.service: Service
        self.client: LocalClient
        self.server: uvicorn.Server
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="server")

    def start(self, *, is_open: bool = True) -> None:
        self._is_open = is_open
        self._thread.start()
        assert self._started.wait(20), "the server did not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(setattr, self.server, "should_exit", True)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(20)

    def wait_idle(self) -> None:
        """Until nothing runs and every block is free; fails after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            stats = self.do(self.client.stats)
            if not stats.running and not stats.waiting and stats.blocks_free == stats.blocks_total:
                assert self.client.num_open == 0
                return
            time.sleep(0.005)
        raise AssertionError(f"still busy: {stats}")

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self.client = await LocalClient.start(lambda: self.engine)
        self.service = Service(self.config, Tenants.open(self.config, self.home))
        self.service.watch(self.client)
        text = self._tokenizer, self.template
        model = ServedModel(self.name, self.client, *text, 1, self._defaults, self._grammars)
        if self._is_open:
            self.service.open(model)
        listener = listen(self.config)
        self.url = url_of(self.config, listener)
        self.server = DrainingServer(self.service, self.config)
        self._loop.call_later(0.0, self._started.set)
        await self.server.serve(sockets=[listener])
        await self.client.close()
        self.template.close()
        if self._grammars is not None:
            self._grammars.close()


@contextmanager
def serving(
    engine: EchoEngine | None = None,
    *,
    is_open: bool = True,
    name: str = "echo",
    defaults: SamplingDefaults | None = None,
    template: str = TEMPLATE,
    home: Path = Path("/nonexistent"),
    tokenizer: Tokenizer | None = None,
    grammars: GrammarChecker | None = None,
    **config: Any,
) -> Iterator[Harness]:
    settings, text = ServerConfig(port=0, **config), (tokenizer, grammars)
    harness = Harness(engine or EchoEngine(), settings, name, defaults, template, home, *text)
    harness.start(is_open=is_open)
    try:
        yield harness
    finally:
        harness.stop()
