"""Beam search finds what transformers finds, in any company, and refuses what it cannot do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from headway import LLM
from headway.beam import BeamCompletion, BeamSearch, beam_search
from headway.errors import RequestError
from headway.values.plan import TokenLogprob
from tiny_dir import tiny_options

PROMPTS = [[5, 17, 99, 42], [200, 3, 3, 8, 121, 77, 30], [60], list(range(10, 50))]
MANY_ENDS = [42, 86, 110, 187, 192, 233, 241, 263]  # of which this model chooses some early


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": MANY_ENDS}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(**tiny_options(folder, dtype="float32", kv_dtype="float32")) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def theirs(folder: Path, llm: LLM) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("ends", [True, False], ids=["with ends", "without"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, theirs: LlamaForCausalLM, width: int, penalty: float, ends: bool
) -> None:
    mine = beam_search(llm, PROMPTS, width=width, max_tokens=11, length_penalty=penalty, ignore_eos=not ends)
    lengths = set()
    for prompt, completion in zip(PROMPTS, mine, strict=True):
        found = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width,
            num_return_sequences=width, max_new_tokens=11, length_penalty=penalty, do_sample=False,
            eos_token_id=MANY_ENDS if ends else None, pad_token_id=-100, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        answers = [[t for t in row[len(prompt) :].tolist() if t != -100] for row in found.sequences]
        assert [answer.token_ids for answer in completion.outputs] == answers
        if width > 1:  # a single beam is their greedy search, which has no scores
            assert [a.score for a in completion.outputs] == pytest.approx(found.sequences_scores.tolist(), rel=1e-5)
        for answer in completion.outputs:
            assert (answer.token_ids[-1] in MANY_ENDS) == (answer.finish_reason == "stop") or not ends
        lengths |= {len(answer) for answer in answers}
    if penalty < 2:  # else long answers alone are good ones
        assert (len(lengths) > 1) == ends


def test_answers_do_not_depend_on_company(llm: LLM) -> None:
    together = beam_search(llm, PROMPTS, width=3, max_tokens=9)
    alone = [beam_search(llm, prompt, width=3, max_tokens=9)[0] for prompt in PROMPTS]
    assert together == alone


def test_a_beam_finds_its_parents_blocks_in_the_cache(llm: LLM) -> None:
    prompt = [(7 * i) % 250 for i in range(200)]
    before = llm.stats()
    beam_search(llm, prompt, width=4, max_tokens=20, ignore_eos=True)
    num_computed = llm.stats().tokens_computed - before.tokens_computed
    assert num_computed <= 200 + 4 * 20 * 16  # instead of 77 times the prompt


def test_texts_come_back_as_texts_and_progress_is_told(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    texts = ["hello world", "x"]
    found: list[BeamCompletion] = beam_search(
        llm, texts, width=2, max_tokens=5, ignore_eos=True, on_progress=lambda *each: told.append(each)
    )
    assert [completion.prompt for completion in found] == texts
    for completion in found:
        assert completion.prompt_tokens == llm.tokenizer.encode(str(completion.prompt))
        for answer in completion.outputs:
            assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert [answer.score for answer in completion.outputs] == sorted(
            (answer.score for answer in completion.outputs), reverse=True
        )
    assert told == [(0, 2), (0, 6), (0, 10), (0, 14), (2, 18)]
    assert beam_search(llm, []) == []


def test_an_answer_better_than_every_live_beam_ends_the_search() -> None:
    search = BeamSearch(width=1, max_tokens=9, ends=frozenset({7}))
    search.grow([TokenLogprob(0.0, ((7, math.log(0.6)), (1, math.log(0.4))))])
    assert search.live == []
    assert [beam.tokens for _, beam in search.ended] == [(7,)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"width": 0}, r"width is 0; allowed: 1 to 12 \(this model has 8"),
        ({"width": 13}, "width is 13; allowed: 1 to 12"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed: 1 or more"),
        ({"max_tokens": 510}, "4 tokens and max_tokens 510 are more than the context of 512"),
    ],
)
def test_what_cannot_be_done_is_refused(llm: LLM, given: dict[str, int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        beam_search(llm, PROMPTS[0], **given)  # type: ignore[arg-type]
