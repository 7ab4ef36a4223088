"""Main of the process that makes vectors: `Setup` comes first, then texts, one frame after the other, until the end.

It steps back behind the engine where both want the same cores. It has nothing to lose: when the server is gone, the end
of its input ends it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from headway import logs
from headway.embedding.frames import HEAD_BYTES, MAX_FRAME_BYTES, Opened, Setup, Texts, Vectors, decode, frame
from headway.errors import EngineError

log = logging.getLogger(__name__)

_NICENESS = 5  # beside a busy engine about a third of what it would get as an equal


def main() -> int:
    """Serve the two ends that this process was started with."""
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)  # the server ends it
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no frame
    try:
        setup = decode(_read(source), Setup)
        logs.set_up("embedding", setup.log_level, setup.log_format)
        os.nice(_NICENESS)
        embed, opened = _open(setup)
        _write(sink, opened)
        while embed is not None:
            _write(sink, embed(decode(_read(source), Texts)))
    except (EOFError, BrokenPipeError):
        return 0
    return 1


def _open(setup: Setup) -> tuple[Callable[[Texts], Vectors] | None, Opened]:
    """The model as a function, and what there is to say of it."""
    from headway.embedding.model import load_embedding_model  # takes a while: a wrong setup is told before
    from headway.embedding.source import open_embedding_source
    from headway.modelfile.cache import ModelCache, default_root

    try:
        cache = ModelCache(Path(setup.cache_dir).expanduser() if setup.cache_dir else default_root())
        source = open_embedding_source(setup.model, cache)
        threads = setup.threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        model = load_embedding_model(source, setup.kernels, threads)
    except EngineError as error:
        return None, Opened(error=str(error))
    except Exception as error:
        log.exception("the embedding model could not be loaded")
        return None, Opened(error=f"it could not be loaded: {error!r}")

    def embed(asked: Texts) -> Vectors:
        try:
            return Vectors(model.embed(asked.texts).astype("<f4").tobytes())
        except Exception as error:
            log.exception("vectors could not be computed")
            return Vectors(error=repr(error))

    return embed, Opened(model.size, model.max_tokens, model.vocab_size, model.dtype, model.kernels)


def _read(source: BinaryIO) -> bytes:
    length = int.from_bytes(_exactly(source, HEAD_BYTES), "little")
    if length > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return _exactly(source, length)


def _exactly(source: BinaryIO, count: int) -> bytes:
    data = source.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _write(sink: BinaryIO, message: Opened | Vectors) -> None:
    sink.write(frame(message))
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
