"""The real engine under settings that change: larger steps than it began with, and the same answers."""

from __future__ import annotations

from pathlib import Path

from headway import LLM, SamplingParams
from tiny_dir import write_tiny_model

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(900)] for i in range(3)]
PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


def test_a_step_may_grow_beyond_what_it_began_with(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_len=1024)
    with LLM(
        str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        num_blocks=300,
        threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefix_caching=False,
    ) as llm:
        small = llm.generate(PROMPTS, PARAMS)
        num_small = llm.stats().steps
        told = llm._engine.reconfigure({"max_num_batched_tokens": 4000, "max_num_seqs": 3})
        assert (told["max_num_batched_tokens"], told["max_num_seqs"]) == (4000, 3)
        large = llm.generate(PROMPTS, PARAMS)
        num_large = llm.stats().steps - num_small
    assert num_small > 80
    assert num_large == 5  # one step for all prompts, four for the rest of the answers
    assert [each.outputs for each in large] == [each.outputs for each in small]
