"""A server whose engine gives every request one token a tick and computes nothing: what `front_bench` measures.

    tools/ticking_engine.py serve MODEL_FOLDER      the server as `headway serve` runs it, over the engine below
    tools/ticking_engine.py --fd N …                that engine, in a process of its own, started by the server

HTTP, text, client and wire are the real ones. The environment has the tick, TICK_MS (at 0 a token comes at once), and
the core for the engine, ENGINE_CORE, if it is to have one.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import headway

sys.path += [str(Path(headway.__file__).resolve().parents[2] / "tests" / "support")]  # of the tree that is measured

from echo_engine import EchoEngine
from headway.cli.engine_child import end
from headway.cli.engine_child import main as engine_main
from headway.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from headway.engine.client import Output
from headway.values.plan import Emission

MAX_LEN = 16384
NUM_SLOTS = 8192
_IDLE_S = 0.001


class TickingEngine(EchoEngine):
    """A step ends at a multiple of the tick and gives each running request one token."""

    def __init__(self, tick_s: float) -> None:
        super().__init__(max_model_len=MAX_LEN, slots=NUM_SLOTS, max_waiting=NUM_SLOTS, num_blocks=10**8)
        self.info = replace(
            self.info, eos_ids=()
        )  # the model's own end token is a special one; these answers have none
        self._tick_s = tick_s
        self._due = 0.0

    def step(self) -> Emission[Output]:
        """Nothing comes before the tick, but commands are taken every millisecond."""
        now = time.monotonic()
        if now < self._due:
            time.sleep(min(_IDLE_S, self._due - now))
            return Emission()
        if self._tick_s:
            self._due = now - now % self._tick_s + self._tick_s
        return super().step()


def build(config: EngineConfig) -> TickingEngine:
    if "ENGINE_CORE" in os.environ:
        os.sched_setaffinity(0, {int(os.environ["ENGINE_CORE"])})
    return TickingEngine(float(os.environ.get("TICK_MS", "100")) / 1e3)


def serve(model: str) -> int:
    """Until a signal."""
    from headway.serve.run import run

    config = ServeConfig(
        engine=EngineConfig(model=ModelConfig(model=model)),
        server=ServerConfig(port=0, log_level="warning", max_connections=NUM_SLOTS, max_connections_per_ip=NUM_SLOTS),
    )
    return run(config, command=(__file__,))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2]))
    end(engine_main(build=build))
