"""The model of `--embedding-model` as the server has it: its process, its tokenizer, its name."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from headway.config import ServeConfig
from headway.embedding.client import EmbeddingClient
from headway.embedding.frames import Setup
from headway.embedding.source import open_embedding_source
from headway.errors import ConfigError
from headway.modelfile.cache import ModelCache
from headway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedEmbedder:
    """Ready to be asked."""

    name: str
    client: EmbeddingClient
    tokenizer: Tokenizer
    created: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text."""
        return self.client.opened.max_tokens


async def open_embedder(config: ServeConfig, cache: ModelCache) -> ServedEmbedder | None:
    """Start the process and read the tokenizer; None where no model is named. ConfigError if it cannot be."""
    model = config.server.embedding_model
    if model is None:
        return None
    source = await asyncio.to_thread(open_embedding_source, model, cache)
    wanted, server = config.engine.model, config.server
    setup = Setup(model, wanted.cache_dir, wanted.kernels, wanted.threads, server.log_level, server.log_format)
    client = EmbeddingClient(setup)
    try:
        await client.start()
        tokenizer = await asyncio.to_thread(Tokenizer.open, source.tokenizer)
        if tokenizer.vocab_size > client.opened.vocab_size:
            raise ConfigError(
                f"embedding_model is {model!r}: its tokenizer has {tokenizer.vocab_size} tokens, its weights have "
                f"{client.opened.vocab_size}"
            )
    except BaseException:
        await client.close()
        raise
    told = client.opened
    log.info("embeddings by %s: %d numbers, %d tokens, %s", source.name, told.size, told.max_tokens, told.dtype)
    return ServedEmbedder(source.name, client, tokenizer, int(time.time()))
