"""An engine process around `EchoEngine`: what `ProcessClient` starts in tests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from echo_engine import EchoEngine
from headway.cli.engine_child import main
from headway.config import EngineConfig
from headway.errors import ConfigError


def build(config: EngineConfig) -> EchoEngine:
    """The model's name says what should happen."""
    name = Path(config.model.model).name
    if name == "bad-config":
        raise ConfigError("the model is not good enough")
    if name == "crash-in-build":
        raise ValueError("out of luck")
    if name == "die-in-build":
        os._exit(7)
    return EchoEngine(max_model_len=config.model.max_model_len or 512, on_step=_step_of(name))


def _step_of(model: str) -> Callable[[], None]:
    count = iter(range(10**9))

    def step() -> None:
        at = next(count)
        if model == "die-in-step" and at == 5:
            os._exit(9)
        if model == "raise-in-step" and at == 5:
            raise RuntimeError("step went wrong")
        if model == "slow":
            time.sleep(0.005)
        if model == "hang-in-step":
            while True:
                os.sched_yield()

    return step


if __name__ == "__main__":
    sys.exit(main(build=build))
