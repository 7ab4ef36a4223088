"""`LLM` on a tiny model directory: texts, tokens, n, stops, seeds, log probabilities, streams, refusals, logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from headway import LLM, EngineConfig, SamplingParams
from headway.errors import ConfigError, ModelFormatError, RequestError
from headway.fingerprint import source_digest
from tiny_dir import tiny_options

PROMPTS = ["hello world", "a longer prompt about nothing in particular, twice the length of others", "x"]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(**tiny_options(folder)) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.mark.parametrize("kernels", ["auto", "ref"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("float32", "fp16"), ("float32", "int8"), ("bfloat16", "float32"), ("int8", "fp16"),
     ("int8", "int8"), ("q4", "fp16")],
)  # fmt: skip
def test_every_format_answers_alike_in_a_batch_and_alone(folder: Path, dtype: str, kv_dtype: str, kernels: str) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(**tiny_options(folder, kv_dtype=kv_dtype, kernels=kernels, dtype=dtype)) as llm:  # type: ignore[arg-type]
        assert (llm.info.dtype, llm.info.kv_dtype) == (dtype, kv_dtype)
        assert f":{dtype}:{kv_dtype}:" in llm._engine._identity
        facts = llm.info.computes_with()
        assert facts["source_digest"] == source_digest()
        is_native = str(facts["kernels"]).startswith("native-")
        assert bool(facts["kernels_digest"]) == is_native
        assert bool(facts["kernels_fallback"]) == (kernels == "auto" and not is_native)
        together = [completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, params)]
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert together == alone


def test_memory_for_kv_is_counted_in_its_format(folder: Path) -> None:
    counts = {}
    for kv_dtype in ("float32", "fp16", "int8"):
        given = tiny_options(folder, kv_dtype=kv_dtype, num_blocks=None, kv_memory_gb=0.01)
        with LLM(**given) as llm:  # type: ignore[arg-type]
            counts[kv_dtype] = llm.info.num_blocks
    assert counts["fp16"] >= 2 * counts["float32"]
    assert counts["int8"] > counts["fp16"]


def test_answers_come_in_order_with_everything_asked_for(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    params = SamplingParams(max_tokens=9, temperature=0, logprobs=2)
    completions = llm.generate(PROMPTS, params, lambda done, tokens: seen.append((done, tokens)))
    assert [completion.prompt for completion in completions] == PROMPTS
    for completion in completions:
        (answer,) = completion.outputs
        assert 1 <= len(answer.token_ids) <= 9
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        assert all(entry.top[0][0] == token for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.finish_reason in ("stop", "length")
        timing = completion.timing
        assert timing is not None
        assert 0 <= timing.queued_s <= timing.first_token_s <= timing.total_s
    assert seen[-1] == (3, sum(len(completion.outputs[0].token_ids) for completion in completions))


def test_one_text_or_one_list_of_tokens_is_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    (text,) = llm.generate("hello world", params)
    (tokens,) = llm.generate(text.prompt_tokens, params)
    assert tokens.prompt is None
    assert tokens.outputs == text.outputs


def test_the_same_seed_gives_the_same_tokens_in_any_batch_and_another_seed_others(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    alone = llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
    together = llm.generate(PROMPTS, params)[0].outputs[0].token_ids
    other = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, seed=8, ignore_eos=True))[0].outputs[0].token_ids
    assert alone == together != other


def test_n_answers_differ_and_the_first_is_the_one_of_n_equals_one(llm: LLM) -> None:
    several = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=12, seed=7, n=4, ignore_eos=True))[0].outputs
    single = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=12, seed=7, ignore_eos=True))[0].outputs
    assert [answer.index for answer in several] == [0, 1, 2, 3]
    assert several[0].token_ids == single[0].token_ids
    assert len({tuple(answer.token_ids) for answer in several}) == 4


def test_a_stop_string_cuts_text_and_tokens_exactly(llm: LLM) -> None:
    free = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=30, seed=3, ignore_eos=True))[0].outputs[0]
    stop = free.text[7:9]
    cut = free.text.index(stop)
    for logprobs in (None, 1):
        params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, stop=stop, logprobs=logprobs)
        answer = llm.generate([PROMPTS[0], PROMPTS[2]], params)[0].outputs[0]
        assert (answer.text, answer.finish_reason) == (free.text[:cut], "stop")
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
        assert len(answer.token_ids) < 30
        assert stop in llm.tokenizer.decode(answer.token_ids)
        assert logprobs is None or len(answer.logprobs or ()) == len(answer.token_ids)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("batching", ["continuous", "static:2"])
def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(folder: Path, batching: str, logprobs) -> None:
    with LLM(**tiny_options(folder, batching=batching)) as llm:  # type: ignore[arg-type]
        free = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=30, seed=3, ignore_eos=True))[0].outputs[0]
        params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, stop=free.text[7:9], logprobs=logprobs)
        cut = llm.generate([PROMPTS[0]], params)[0].outputs[0]
        exact = replace(params, max_tokens=len(cut.token_ids))
        other = SamplingParams(max_tokens=40, ignore_eos=True)
        both = llm.generate([PROMPTS[0], PROMPTS[2]], [exact, other])
        assert both[0].outputs[0] == cut
        assert cut.finish_reason == "stop"
        assert len(both[1].outputs[0].token_ids) == 40


def test_chat_and_its_stream_agree(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=20, seed=1)
    (completion,) = llm.chat([messages], params)
    assert llm.tokenizer.decode(completion.prompt_tokens) == "[user]hello[a]"
    assert "".join(llm.stream_chat(messages, params)) == completion.outputs[0].text
    assert [each.outputs[0].text for each in llm.chat(messages, params)] == [completion.outputs[0].text]  # one alone


def test_a_stream_that_is_left_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks_total)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([1, 999_999], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1] * 600, SamplingParams(max_tokens=1), "prompt"),
        ([1] * 500, SamplingParams(max_tokens=100), "max_tokens"),
        ([1], SamplingParams(logit_bias={999_999: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=[999_999]), "stop_token_ids"),
    ],
)
def test_a_request_at_fault_is_refused_before_anything_runs(
    llm: LLM, prompt: list[int], params: SamplingParams, param: str
) -> None:
    before = llm.stats().steps
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2], prompt], params)
    assert caught.value.param == param
    assert llm.stats().steps == before
    assert llm.stats().waiting == 0


def test_a_request_larger_than_the_kv_memory_is_refused_before_anything_runs(folder: Path) -> None:
    prompts, params = [*[[1, 2]] * 40, [1] * 100], SamplingParams(max_tokens=30)
    with LLM(**tiny_options(folder, num_blocks=8, max_waiting=4, max_num_seqs=2)) as llm:  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"prompt \(100\) plus max_tokens \(30\) needs more than the 128 tokens"):
            llm.generate(prompts, params)
        assert llm.stats().steps == 0
        (fits,) = llm.generate([[1] * 99], SamplingParams(max_tokens=30, ignore_eos=True))  # its last is not computed
        assert len(fits.outputs[0].token_ids) == 30


def test_params_are_one_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 params for 3 prompts"):
        llm.generate(PROMPTS, [SamplingParams()] * 2)


def test_depth_two_and_small_pools_change_no_token(folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, n=3)
    expected = llm.generate(PROMPTS, params)
    with LLM(**tiny_options(folder, depth=2, num_blocks=14, max_num_seqs=6, max_chunk_tokens=16)) as small:  # type: ignore[arg-type]
        answers = small.generate(PROMPTS, params)
        assert small.stats().preemptions > 0
    assert [completion.outputs for completion in answers] == [completion.outputs for completion in expected]


def test_more_prompts_than_may_wait_are_fed_bit_by_bit(folder: Path) -> None:
    with LLM(**tiny_options(folder, max_waiting=2, max_num_seqs=2)) as llm:  # type: ignore[arg-type]
        assert len(llm.generate(["a", "b", "c", "d", "e", "f"], SamplingParams(max_tokens=2))) == 6


def test_a_step_log_on_a_full_disk_ends_and_answers_go_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(**tiny_options(folder, step_log="/dev/full")) as llm:  # type: ignore[arg-type]
        answers = [llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(2)]
    assert [len(each[0].outputs[0].token_ids) for each in answers] == [4, 4]
    assert [each.message for each in caplog.records if "step log" in each.message] == [
        "the step log ends here, the engine goes on: /dev/full: No space left on device"
    ]


def test_a_step_log_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_log is .*nowhere.*No such file"):
        LLM(**tiny_options(folder, step_log=str(tmp_path / "nowhere" / "log")))  # type: ignore[arg-type]


def test_the_step_log_has_the_number_of_computed_tokens(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    with LLM(**tiny_options(folder, step_log=str(log))) as llm:  # type: ignore[arg-type]
        prompt = list(range(100))
        llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        again = llm.generate([[*prompt, 1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
        stats = llm.stats()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    computed = [event["num_computed"] for event in events if event["event"] == "Stepped"]
    assert sum(computed) == stats.tokens_computed == 100 + 1 + (102 - 96) + 1
    assert again[0].num_cached == 96


def test_options_are_given_one_way_or_the_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        LLM("x", config=EngineConfig())
    with pytest.raises(ConfigError, match="unknown option 'blocksize'"):
        LLM(blocksize=3)


def test_a_context_longer_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        LLM(**tiny_options(folder, max_model_len=513))  # type: ignore[arg-type]


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError):
        LLM(str(tmp_path), cache_dir=str(tmp_path / "cache"))


def test_streams_that_are_read_in_turns_have_all_their_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    alone = ["".join(llm.stream(prompt, params)) for prompt in PROMPTS[:2]]
    pieces = zip_longest(*(llm.stream(prompt, params) for prompt in PROMPTS[:2]), fillvalue="")
    assert ["".join(column) for column in zip(*pieces, strict=True)] == alone
    stream = llm.stream(PROMPTS[0], params)
    first = next(stream)
    longer = replace(params, max_tokens=30)
    meanwhile = llm.generate(PROMPTS[1:], longer)
    assert [completion.outputs[0].token_ids for completion in meanwhile] == [
        completion.outputs[0].token_ids for completion in llm.generate(PROMPTS[1:], longer)
    ]
    assert all(len(completion.outputs[0].logprobs or ()) == 30 for completion in meanwhile)
    assert first + "".join(stream) == alone[0]
    assert not llm._live
    assert not llm._watched
    assert not llm._grown


@pytest.mark.parametrize("batching", ["continuous", "static:2", "dynamic:2,window=0"])
def test_a_call_that_was_given_up_does_not_disturb_the_next(folder: Path, batching: str) -> None:
    short, long = (SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (2, 20))

    def give_up(num_done: int, num_tokens: int) -> None:
        if num_tokens >= 6:
            raise KeyboardInterrupt

    with LLM(**tiny_options(folder, max_num_seqs=2, batching=batching)) as llm:  # type: ignore[arg-type]
        expected = llm.generate(PROMPTS[2], long)[0].outputs[0].token_ids
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:2], [short, long], on_progress=give_up)
        assert llm.generate(PROMPTS[2], long)[0].outputs[0].token_ids == expected
        assert not llm._live
        assert not llm._grown
