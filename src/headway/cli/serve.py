"""`headway serve`: the OpenAI-compatible server. Owns flags and nothing of the server itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.cli.args import Common, CommonFlags, EngineFlags, EngineOptions, RayFlags, ServerFlags
from headway.cli.choice import describe
from headway.config import ServeConfig, ServerConfig
from headway.config_ray import RayConfig

EXAMPLES = """Examples:
  headway serve
  headway serve ./Llama-3.2-1B --port 9000 --max-model-len 4096
  headway serve model.gguf --kv-memory-gb 4 --max-num-seqs 128
  HEADWAY_API_KEY=secret headway serve --host 0.0.0.0
  headway serve --keys keys.toml --fair --max-queue-s 5
  headway serve --ray auto --ray-min 1 --ray-max 4
  headway serve --print-config > headway.toml
  headway serve --config headway.toml"""


def command(reparse: Callable[[], Mapping[str, Any]]) -> Callable[..., int]:
    """The command; `reparse` gives its arguments anew, from the same flags and variables and the file as it is then."""

    def serve(
        model: str | None = None,
        /,
        *,
        engine: EngineFlags = EngineOptions(),
        server: ServerFlags = ServerConfig(),
        ray: RayFlags = RayConfig(),
        common: CommonFlags = Common(),
    ) -> int:
        """Serve a model over HTTP, with the OpenAI API.

        Without MODEL the bundled SmolLM2-135M-Instruct is served. On SIGHUP the file given with --config is read
        again, and what can change while it runs is changed.

        Parameters
        ----------
        model
            The model; the same as --model.
        """
        config = ServeConfig(engine=engine.config(model), server=server, ray=ray)
        if common.print_config:
            print(describe(config))
            return 0
        from headway.serve.run import run  # the server's packages are not needed to print help or a config

        return run(config, reread=None if common.config is None else lambda: reread_config(reparse))

    return serve


def reread_config(reparse: Callable[[], Mapping[str, Any]]) -> ServeConfig:
    given = reparse()
    engine: EngineOptions = given.get("engine", EngineOptions())
    server, ray = given.get("server", ServerConfig()), given.get("ray", RayConfig())
    return ServeConfig(engine=engine.config(given.get("model")), server=server, ray=ray)
