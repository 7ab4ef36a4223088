"""Every cell of the exactness matrix on a two-layer random model, and one cell of the embedded one.

The whole matrix on the embedded model is `scripts/exactness`.
"""

from types import SimpleNamespace

import pytest
import torch

from exactness import Cell, all_cells, filler_prompts, read_prompts, reference, run_cell
from headway.backends.backend import Backend
from headway.build import Loaded, load_model
from headway.config import EngineConfig
from headway.kernels.ops import KernelSet
from headway.text.tokenizer import Tokenizer
from tiny_models import kernel_sets, random_tensors, tiny_decoder, tiny_spec


def _tiny(kernels: KernelSet) -> Loaded:
    spec = tiny_spec()
    source = SimpleNamespace(name="tiny", digest="tiny", eos_ids=())
    backend = Backend("cpu", torch.device("cpu"), "float32", kernels, 1, lambda: 2**33)
    return Loaded(source, spec, backend, tiny_decoder(spec, kernels))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)
def test_no_cell_of_a_small_model_differs_in_a_token_or_a_bit(kernels: KernelSet) -> None:
    loaded = _tiny(kernels)
    spec = loaded.spec
    prompts = [[(7 * i + 3 * j) % spec.vocab_size for j in range(2 + 9 * i)] for i in range(1, 7)]
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": spec.vocab_size, "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate, "num_hidden_layers": spec.layers, "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_len, "tie_word_embeddings": True, "eos_token_id": None,
    }  # fmt: skip
    expected = reference(config, random_tensors(spec), prompts, 12)
    digests: dict[bytes, bytes] = {}
    fillers = filler_prompts(spec.vocab_size)
    for cell in all_cells():
        answers, recorder, num_preempted = run_cell(cell, loaded, prompts, 12, digests, fillers)
        assert answers == expected, cell
        assert not recorder.mismatches, cell
        assert recorder.num_rows >= 6 * 12
        assert bool(num_preempted) == cell.preempts


def test_the_embedded_model_answers_as_transformers_does() -> None:
    loaded = load_model(EngineConfig.of(dtype="float32"))
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    lines = read_prompts()
    prompts = [tokenizer.encode(lines[i]) for i in (0, 6, 9, 19)]
    expected = reference(loaded.source.config, dict(loaded.source.tensors()), prompts, 16)
    digests: dict[bytes, bytes] = {}
    fillers = filler_prompts(loaded.spec.vocab_size)
    for cell in (Cell(0, None, False, False, 1), Cell(16, 64, True, True, 2)):
        answers, recorder, _ = run_cell(cell, loaded, prompts, 16, digests, fillers)
        assert answers == expected, cell
        assert not recorder.mismatches, cell
