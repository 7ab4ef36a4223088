"""The backend seam: whatever loads a model and makes executors of it can be put behind an engine, by name."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import null_backend
from headway.backends import cpu
from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.control.costs import CostModel, CostWeights
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.kernels.library import cpu_level
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder
from headway.models.registry import read_config
from headway.models.spec import Config, ModelSpec
from headway.values.params import SamplingParams
from headway.values.work import Work
from tiny_dir import write_tiny_model

NULL = "null_backend:PLUGIN"


def test_a_backend_from_outside_is_built_by_its_name() -> None:
    engine = build_engine(EngineConfig.of(device=NULL, model="nothing", block_size=4), keeps_tokens=True)
    info = engine.info
    assert (info.model, info.vocab_size, info.max_model_len, info.eos_ids) == ("nothing", 100, 64, (2,))
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (40, 4, 3), "what its executor has room for"
    assert info.computes_with()["kernels_fallback"] == "there is nothing to compute"
    for id in range(5):
        engine.add(Submit(id, [1, 2, 3], SamplingParams(max_tokens=4)))
    ended = {}
    while engine.has_work:
        ended |= {output.id: list(output.tokens) for output in engine.step().finished}
        assert engine.scheduler.num_running <= null_backend.SLOTS
    assert ended == {id: [null_backend.TOKEN] * 4 for id in range(5)}
    assert engine.stats().blocks_free == null_backend.NUM_BLOCKS
    engine.close()


def test_steps_that_keep_a_target_have_the_sizes_that_an_executor_pads_to() -> None:
    engine = build_engine(EngineConfig.of(device=NULL, target_itl_ms=50.0, block_size=4))
    pacer, costs = engine.scheduler.state.pacer, engine.scheduler.state.costs
    assert pacer is not None
    assert isinstance(costs, CostModel)
    costs.weights, costs.is_ready, costs.learns = CostWeights(base=0.02, tokens=0.001), True, False
    assert pacer.tokens(Work(decode=3), 0) == 24 - 3
    engine.close()


def test_what_is_asked_for_wins_over_the_defaults_of_a_backend() -> None:
    assert build_engine(EngineConfig.of(device=NULL, max_num_seqs=2)).info.max_num_seqs == 2


def test_a_context_longer_than_the_models_is_refused_whatever_computes() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 65; this model's context allows at most 64"):
        build_engine(EngineConfig.of(device=NULL, max_model_len=65))


def test_no_torch_is_imported_for_a_backend_without_it() -> None:
    lines = (
        "import sys",
        f"sys.path[:0] = {[str(Path(null_backend.__file__).parent), *sys.path]!r}",
        "from headway.build import build_engine",
        "from headway.config import EngineConfig",
        f"build_engine(EngineConfig.of(device={NULL!r})).close()",
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu", "device is 'tpu'; allowed: cpu, cuda or my.module:Thing"), ("nowhere:Thing", "cannot import 'nowhere'")],
)
def test_a_backend_that_is_not_there_is_refused(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(EngineConfig.of(device=device))


@dataclass(frozen=True, slots=True)
class SharingSpec(ModelSpec):
    """A model with something that a later family may bring."""

    shared_layers: int = 0


@pytest.mark.skipif(cpu_level() == "none", reason="there are no native kernels to fall back from")
@pytest.mark.parametrize("shared", [0, 2])
def test_a_model_that_native_cannot_run_falls_to_torch_and_says_why(
    shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(config: Config, family: str | None) -> ModelSpec:
        return SharingSpec(**asdict(read_config(config)), shared_layers=shared)

    write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(cpu, "read_config", read)
    config = EngineConfig.of(model=str(tmp_path / "tiny"), cache_dir=str(tmp_path), threads=1, num_blocks=8)
    with caplog.at_level(logging.WARNING):
        loaded = cpu.load_model(config)
    engine = build_engine(config, loaded)
    reason = "the native decoder does not know shared_layers = 2"
    assert isinstance(loaded.decoder, Decoder if shared else NativeDecoder)
    assert (reason in engine.info.kernels_fallback) == bool(shared)
    assert engine.info.kernels.startswith("native-")
    logged = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert len(logged) == bool(shared), "said once"
    engine.close()
