"""`headway route`: a front without an engine of its own; those that join serve its requests. Owns flags alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.cli.args import Common, CommonFlags, EngineFlags, EngineOptions, ServerFlags
from headway.cli.choice import describe
from headway.cli.serve import reread_config
from headway.config import ServeConfig, ServerConfig
from headway.errors import ConfigError

EXAMPLES = """Examples:
  headway route --listen-engines 127.0.0.1:7500
  headway route ./Llama-3.2-1B --listen-engines 0.0.0.0:7500 --engine-key-file key --tls-cert cert.pem --tls-key key.pem
  headway engine ./Llama-3.2-1B --join front:7500 --key-file key --tls-ca cert.pem    # on other machines"""


def command(reparse: Callable[[], Mapping[str, Any]]) -> Callable[..., int]:
    """The command; `reparse` gives its arguments anew, from the same flags and variables and the file as it is then."""

    def route(
        model: str | None = None,
        /,
        *,
        engine: EngineFlags = EngineOptions(),
        server: ServerFlags = ServerConfig(),
        common: CommonFlags = Common(),
    ) -> int:
        """Serve a model over HTTP by engines that join, and compute nothing here.

        The model's tokenizer and chat template are read on this machine, its weights are not.

        Parameters
        ----------
        model
            The model; the same as --model.
        """
        if server.listen_engines is None:
            raise ConfigError("route needs --listen-engines HOST:PORT, where engines join: 127.0.0.1:7500, say")
        config = ServeConfig(engine=engine.config(model), server=replace(server, replicas=0))
        if common.print_config:
            print(describe(config))
            return 0
        from headway.serve.run import run  # the server's packages are not needed to print help or a config

        def reread() -> ServeConfig:
            again = reread_config(reparse)
            return replace(again, server=replace(again.server, replicas=0))

        return run(config, reread=None if common.config is None else reread)

    return route
