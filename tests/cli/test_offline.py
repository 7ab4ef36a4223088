"""`generate` and `chat` with a whole model in this process: a tiny GGUF file of random weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import gguf_files
from headway.cli.main import main

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}a"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    metadata, tensors = gguf_files.tiny_model()
    path = gguf_files.write(tmp_path / "tiny.gguf", metadata | {"tokenizer.chat_template": TEMPLATE}, tensors)
    fields = {"model": str(path), "cache_dir": str(tmp_path / "cache"), "num_blocks": "64", "threads": "1"}
    fields |= {"max_tokens": "6", "temperature": "0", "ignore_eos": "true"}
    return {f"HEADWAY_{name.upper()}": value for name, value in fields.items()}


def output(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> str:
    assert main(argv, environ) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out


def test_one_prompt_prints_its_answer_alone_and_always_the_same(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    first = output(capsys, environ, "generate", "abc")
    assert first.strip()
    assert first == output(capsys, environ, "generate", "abc")


def test_json_has_one_line_per_prompt_and_every_answer(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\nb a\n"))
    lines = output(capsys, environ, "generate", "abc", "-", "--n", "2", "--json", "--logprobs", "1").splitlines()
    completions = [json.loads(line) for line in lines]
    assert [completion["prompt"] for completion in completions] == ["abc", "abc", "b a"]
    assert completions[0]["outputs"] == completions[1]["outputs"]
    for completion in completions:
        assert [answer["index"] for answer in completion["outputs"]] == [0, 1]
        for answer in completion["outputs"]:
            assert (len(answer["token_ids"]), len(answer["logprobs"])) == (6, 6)
            assert answer["finish_reason"] == "length"
            # Greedy: the chosen token is the likeliest alternative.
            assert answer["logprobs"][0]["top"][0] == [answer["token_ids"][0], answer["logprobs"][0]["logprob"]]


def test_a_pipe_gets_the_answers_of_several_prompts_alone(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    both = output(capsys, environ, "generate", "abc", "b")
    assert both == output(capsys, environ, "generate", "abc") + output(capsys, environ, "generate", "b")


def test_chat_answers_as_generate_does_with_the_template(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    answer = output(capsys, environ, "generate", "abc", "--chat")
    assert answer == output(capsys, environ, "chat", "abc")
    assert answer == output(capsys, environ, "generate", "abc a")


def test_the_models_recommendation_applies_unless_a_flag_says_otherwise(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path
) -> None:
    metadata, tensors = gguf_files.tiny_model()
    metadata |= {"tokenizer.chat_template": TEMPLATE, "general.sampling.temp": 0.0}
    told = {**environ, "HEADWAY_MODEL": str(gguf_files.write(tmp_path / "told.gguf", metadata, tensors))}
    del told["HEADWAY_TEMPERATURE"]
    hot = ("--max-tokens", "24", "--seed", "1", "--temperature", "1")
    for command in (["generate", "abc"], ["chat", "abc"]):
        greedy = output(capsys, environ, *command, "--max-tokens", "24", "--seed", "1")
        assert output(capsys, told, *command, "--max-tokens", "24", "--seed", "1") == greedy
        assert output(capsys, told, *command, *hot) != greedy
        flag = ("--max-tokens", "24", "--seed", "1", "--default-temperature", "1")
        assert output(capsys, told, *command, *flag) == output(capsys, told, *command, *hot)


def test_prompt_beyond_the_context_is_one_sentence(capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> None:
    assert main(["generate", "b" * 100], environ) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "100" in err
    assert "64" in err


def test_model_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> None:
    assert main(["generate", "abc", "--model", "/no/such/model.gguf"], environ) == 2
    assert "/no/such/model.gguf" in capsys.readouterr().err
