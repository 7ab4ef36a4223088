"""An engine process around `EchoEngine`: what `FleetClient` starts in tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from echo_engine import EchoEngine
from headway.cli.engine_child import end, main
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.errors import ConfigError

POISON = 200


class PoisonedEngine(EchoEngine):
    """A prompt with `POISON` ends the process in the step that would give its first token."""

    def add(self, submit: Submit) -> None:
        super().add(submit)
        if POISON in submit.tokens:
            self._on_step = lambda: os.kill(os.getpid(), signal.SIGSEGV)


def build(config: EngineConfig) -> EchoEngine:
    """The model's name says what should happen."""
    model = Path(config.model.model)
    name = model.name
    if name == "bad-config":
        raise ConfigError("the model is not good enough")
    if name == "crash-in-build":
        raise ValueError("out of luck")
    if name == "die-in-build" or (name == "die-in-second-life" and not _is_first(model)):
        os._exit(7)
    kind = PoisonedEngine if name == "poison" else EchoEngine
    step = _slow if name in ("poison", "die-in-second-life") else _step_of(model)
    num_blocks = config.cache.num_blocks or 4096
    engine = kind(max_model_len=config.model.max_model_len or 512, on_step=step, num_blocks=num_blocks)
    if name == "long-step":
        engine.announced_s = 1.0
    return engine


def _is_first(model: Path) -> bool:
    """Whether this is the first engine of this model: it leaves a file beside it."""
    try:
        model.with_suffix(".life").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def sleep() -> None:
    time.sleep(3600)


def linger() -> None:
    """Fail, with a thread that would keep the process from its exit."""
    threading.Thread(target=sleep).start()
    raise RuntimeError("step went wrong")


def spin() -> None:
    while True:
        os.sched_yield()


def _slow() -> None:
    time.sleep(0.005)


def _step_of(path: Path) -> Callable[[], None]:
    model, count = path.name, iter(range(10**9))

    def step() -> None:
        at = next(count)
        if model == "die-in-step" and at == 5:
            os._exit(9)
        if model == "raise-in-step" and at == 5:
            raise RuntimeError("step went wrong")
        if model == "slow":
            time.sleep(0.005)
        if model == "hang-in-step":
            spin()
        if model == "long-step":
            time.sleep(0.6)
        if model == "hold":
            while not path.with_suffix(".open").exists():
                time.sleep(0.005)
        if at == 5 and model in ("sleep-once", "spin-once", "linger-once") and _is_first(path):
            {"sleep-once": sleep, "spin-once": spin, "linger-once": linger}[model]()

    return step


if __name__ == "__main__":
    end(main(build=build))
