"""Every cell of the exactness matrix on a two-layer random model under every policy, and some of the embedded one.

The whole matrix on the embedded model is `scripts/exactness`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from types import SimpleNamespace

import pytest

from exactness import (
    Cell,
    Outcome,
    all_cells,
    blocks_needed,
    covering_cells,
    filler_prompts,
    read_prompts,
    reference,
    run_cell,
)
from exactness_matrix import choose
from exactness_rules import PLAIN, Rules, all_rules, find_rules
from headway.backends.cpu import CpuDevice, LoadedCpu, load_model
from headway.config import EngineConfig
from headway.kernels.ops import KernelSet
from headway.text.tokenizer import Tokenizer
from tiny_models import kernel_sets, random_tensors, tiny_decoder, tiny_spec

ALONE, FULL = Cell(0, None, False, False, 1), Cell(16, 64, True, True, 2)


def _tiny(kernels: KernelSet) -> LoadedCpu:
    spec = tiny_spec()
    source = SimpleNamespace(name="tiny", digest="tiny", eos_ids=(), config={}, sampling={})
    device = CpuDevice("float32", kernels, 1, lambda: 2**33)
    return LoadedCpu(source, spec, device, tiny_decoder(spec, kernels))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what it is asked, and what it must answer; `digests` is what all cells of it have in common."""

    loaded: LoadedCpu
    prompts: Sequence[Sequence[int]]
    expected: list[list[int]]
    digests: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.expected[0])

    def check(self, cell: Cell, rules: Rules = PLAIN) -> Outcome:
        # Alone there is nothing to order: under policies the shortest and the longest prompt are enough.
        step = 1 if cell.company or rules is PLAIN else len(self.prompts) - 1
        prompts, expected = self.prompts[::step], self.expected[::step]
        fillers = filler_prompts(self.loaded.spec.vocab_size)
        outcome = run_cell(cell, self.loaded, prompts, self.num_tokens, self.digests, fillers, rules)
        assert outcome.answers == expected, (rules.name, cell)
        assert not outcome.recorder.mismatches, (rules.name, cell)
        assert outcome.recorder.num_rows >= len(prompts) * self.num_tokens
        return outcome


@pytest.fixture(scope="module")
def asked() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to the small model and the answers of transformers."""
    spec = tiny_spec()
    prompts = [[(7 * i + 3 * j) % spec.vocab_size for j in range(2 + 9 * i)] for i in range(1, 7)]
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": spec.vocab_size, "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate, "num_hidden_layers": spec.layers, "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_len, "tie_word_embeddings": True, "eos_token_id": None,
    }  # fmt: skip
    return prompts, reference(config, random_tensors(spec), prompts, 12)


@pytest.fixture(scope="module")
def small(asked: tuple[list[list[int]], list[list[int]]]) -> Case:
    """One for all policies, so that bits are compared between them too; the kernels are the fastest there are."""
    return Case(_tiny(kernel_sets()[-1]), *asked)


@pytest.fixture(scope="module")
def embedded() -> Case:
    loaded = load_model(EngineConfig.of(dtype="float32"))
    tokenizer = Tokenizer.open(loaded.source.tokenizer_path())
    lines = read_prompts()
    prompts = [tokenizer.encode(lines[i]) for i in (0, 6, 9, 19)]
    return Case(loaded, prompts, reference(loaded.source.config, dict(loaded.source.tensors()), prompts, 16))


@pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)
def test_no_cell_of_a_small_model_differs_in_a_token_or_a_bit(
    kernels: KernelSet, asked: tuple[list[list[int]], list[list[int]]]
) -> None:
    case = Case(_tiny(kernels), *asked)
    for cell in all_cells():
        assert bool(case.check(cell).stats.preemptions) == cell.preempts


@pytest.mark.parametrize("rules", all_rules(), ids=lambda rules: rules.name)
def test_no_policy_changes_a_token_or_a_bit_in_any_cell(small: Case, rules: Rules) -> None:
    num_by_priority = 0
    for cell in all_cells():
        outcome = small.check(cell, rules)
        num_by_priority += outcome.recorder.num_by_priority
        if cell.company:
            check_effect(rules, cell, outcome)
    assert bool(num_by_priority) == rules.preempts


def check_effect(rules: Rules, cell: Cell, outcome: Outcome) -> None:
    """The effect of the rules is seen: a cell without it would prove nothing."""
    assert bool(outcome.recorder.num_paused) == rules.pauses, (rules.name, cell)
    if rules.reorders or (rules.reorders_by_cache and cell.cache):
        assert outcome.is_reordered, (rules.name, cell)
    elif rules.name == "fcfs" and not cell.cache:  # requests blocked on a prefix may be overtaken
        assert not outcome.is_reordered, cell
    if rules.is_short:
        stats, is_careful = outcome.stats, rules.name == "half-peak"  # peak admission avoids preemptions
        assert bool(stats.preemptions) == (cell.preempts or not is_careful), (rules.name, cell)
        assert bool(stats.swaps) == rules.swaps, (rules.name, cell)
        assert bool(stats.tokens_recomputed) == (stats.preemptions > 0 and not rules.swaps), (rules.name, cell)


def test_the_embedded_model_answers_as_transformers_does(embedded: Case) -> None:
    for cell in (ALONE, FULL):
        embedded.check(cell)


@pytest.mark.parametrize("name", ["half-recompute", "half-swap"])
def test_half_the_memory_changes_no_token_of_the_embedded_model(embedded: Case, name: str) -> None:
    (rules,) = find_rules(name)
    cell = Cell(16, 64, False, False, 2)
    check_effect(rules, cell, embedded.check(cell, rules))


def test_any_two_settings_meet_in_a_covering_cell() -> None:
    cells = [astuple(cell)[1:] for cell in covering_cells()]
    levels = [set(column) for column in zip(*(astuple(cell)[1:] for cell in all_cells()), strict=True)]
    for one, other in itertools.combinations(range(4), 2):
        met = {(cell[one], cell[other]) for cell in cells}
        assert met == set(itertools.product(levels[one], levels[other]))


def test_half_of_what_is_needed_is_half_of_what_is_held_at_the_end() -> None:
    assert blocks_needed([[1] * 5, [1] * 6], 12) == 1 + 2  # the last token's cell is never computed


def test_what_the_script_runs_is_chosen_by_policy_and_number() -> None:
    cells = list(all_cells())
    assert choose("fcfs", None) == [(PLAIN, cell) for cell in cells]
    everything = choose("all", None)
    assert len(everything) == 48 + 6 * (len(all_rules()) - 1)
    assert [(rules.name, cell) for rules, cell in choose("slo,fcfs", "2-3,48")] == [
        (name, cells[i]) for name in ("slo", "fcfs") for i in (1, 2, 47)
    ]
    for policies, numbers in (("lifo", None), ("fcfs", "0"), ("fcfs", "3-2"), ("fcfs", "49"), ("fcfs", "x")):
        with pytest.raises(ValueError, match="allowed: "):
            choose(policies, numbers)
