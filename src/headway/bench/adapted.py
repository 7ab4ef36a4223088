"""What adapters cost over the model alone: some rows, all with one adapter or each with its own.

Engines of one model make a step in turn. The adapters have random numbers and change every matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.backends.cpu import LoadedCpu
from headway.bench.in_turns import Timed, step_in_turns
from headway.build import build_engine
from headway.config import EngineConfig
from headway.config_text import AdapterSource
from headway.engine.engine import Engine
from headway.engine.executor import ReadAdapter
from headway.kernels.low_rank import LowRank, pack_low_rank
from headway.models.adapter import Adapter, module_shapes
from headway.models.spec import ModelSpec
from headway.runner.adapters import NUMBERS_BESIDE
from headway.values.params import SamplingParams

ROWS = 8
RANKS = 8, 16  # PEFT takes 8 where nothing is said
_TOKENS = 100
_PROMPT = 24
_SIZE = 0.01  # of the updates: answers stay ordinary


def adapter_speeds(config: EngineConfig, loaded: LoadedCpu, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each round: without adapters, with one, with one for each row, by rank."""
    used = {"none": (0, 0)}
    used |= {
        f"{count} adapter{'s' * (count > 1)} of rank {rank}": (count, rank) for rank in RANKS for count in (1, ROWS)
    }
    engines = [_engine(config, loaded, count, rank) for count, rank in used.values()]
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    size = loaded.spec.vocab_size
    jobs = [([(37 * (at * _PROMPT + i)) % size for i in range(_PROMPT)], params) for at in range(ROWS)]
    speeds: dict[str, list[float]] = {name: [] for name in used}
    try:
        for turn in range(-1, rounds):  # the first is not counted: caches are cold
            runs = [
                Timed(engine, jobs, adapters=[f"a{row % count}" if count else "" for row in range(ROWS)])
                for engine, (count, _) in zip(engines, used.values(), strict=True)
            ]
            step_in_turns(runs)
            for seen, run in zip(speeds.values(), runs, strict=True):
                if turn >= 0:
                    seen.append(run.num_timed / run.seconds)
    finally:
        for engine in engines:
            engine.close()
    return speeds


def _engine(config: EngineConfig, loaded: LoadedCpu, count: int, rank: int) -> Engine:
    engine = build_engine(config, loaded)
    numbers = NUMBERS_BESIDE.get(loaded.device.dtype, "int8")
    assert engine.adapters is not None, "build_engine makes it"
    for seed in range(count):
        adapter = Adapter(_random_layers(loaded.spec, seed, rank, numbers))
        read = ReadAdapter(f"{seed:064}", adapter.num_bytes, adapter)
        engine.adapters.put(AdapterSource(f"a{seed}", "", ""), read)
    return engine


def _random_layers(spec: ModelSpec, seed: int, rank: int, numbers: str) -> list[dict[str, LowRank]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return np.float32(_SIZE) * rng.standard_normal((rows, columns), np.float32)

    return [
        {
            name: pack_low_rank(matrix(rank, shape.num_in), matrix(shape.num_out, rank), 1.0, numbers)
            for name, shape in module_shapes(spec).items()
        }
        for _ in range(spec.layers)
    ]
