"""Precedence of flags, environment and file, and strictness about all three."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from headway.cli.args import SECTIONS, BatchSampling, ChatSampling
from headway.cli.main import main
from headway.values.params import SamplingParams


def resolved(
    capsys: pytest.CaptureFixture[str], *argv: str, environ: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The flat configuration `headway serve argv` would run with."""
    code = main(["serve", *argv, "--print-config"], environ or {})
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return {name: value for section in tomllib.loads(out).values() for name, value in section.items()}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, environ: Mapping[str, str] | None = None) -> str:
    """The one sentence `headway argv` refuses with."""
    code = main(argv, environ or {})
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("headway: ")
    return err.removeprefix("headway: ").strip()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "headway.toml"
    path.write_text('port = 1\nhost = "0.0.0.0"\n[cache]\nblock_size = 32\nprefix_caching = false\n')
    return path


def test_flags_win_over_environment_over_file_over_defaults(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    file = ("--config", str(config_file))
    assert resolved(capsys)["port"] == 8000
    assert resolved(capsys, *file)["port"] == 1
    assert resolved(capsys, *file, environ={"HEADWAY_PORT": "2"})["port"] == 2
    assert resolved(capsys, *file, "--port", "3", environ={"HEADWAY_PORT": "2"})["port"] == 3


def test_printed_config_says_what_auto_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--kernels", "ref", "--kv-dtype", "int8"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'dtype = "auto"  # float32 here' in lines
    assert 'kv_dtype = "int8"' in lines


def test_sources_mix_field_by_field(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    environ = {"HEADWAY_CONFIG": str(config_file), "HEADWAY_MAX_N": "3"}
    values = resolved(capsys, "--depth", "2", environ=environ)
    assert (values["block_size"], values["prefix_caching"], values["max_n"], values["depth"]) == (32, False, 3, 2)


def test_every_field_of_the_tree_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help-all"], {})
    shown = capsys.readouterr().out
    for kind in SECTIONS.values():
        for field in fields(kind):
            assert f"--{field.name.replace('_', '-')} " in shown


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_shows_what_matters_to_most_and_says_how_to_see_the_rest(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    main([command, "--help"], {})
    short = capsys.readouterr().out
    main([command, "--help-all"], {})
    whole = capsys.readouterr().out
    options = set(re.findall(r"--[a-z-]+ ", short)) - {"--help-all "}
    assert options < set(re.findall(r"--[a-z-]+ ", whole))
    assert "--model " in options
    assert len(options) <= 24
    assert "--help-all shows every option." in short
    assert "--help-all shows every option." not in whole


def test_bare_model_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(capsys, "x.gguf")["model"] == "x.gguf"
    assert resolved(capsys, "--model", "y.gguf")["model"] == "y.gguf"
    assert resolved(capsys, "x.gguf", environ={"HEADWAY_MODEL": "z.gguf"})["model"] == "x.gguf"


def test_printed_config_reads_back_as_the_same_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("a \"b\" 'c' \\ é 🙂.gguf", "--port", "0", "--no-prefix-caching", "--no-resume", "--kv-memory-gb", "0.25")
    main(["serve", *argv, "--print-config"], {})
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert resolved(capsys, "--config", str(path)) == resolved(capsys, *argv)


def test_api_key_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--print-config"], {"HEADWAY_API_KEY": "hunter2"})
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "# api_key is set and not shown" in out


def test_one_file_serves_every_command(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    assert main(["generate", "--config", str(config_file), "--print-config"], {}) == 0
    assert "block_size = 32" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_other_file_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    text = {"json": '{"port": 5, "model": {"threads": 1}}', "yaml": "port: 5\nmodel:\n  threads: 1\n"}[suffix]
    path = tmp_path / f"headway.{suffix}"
    path.write_text(text)
    values = resolved(capsys, "--config", str(path))
    assert (values["port"], values["threads"]) == (5, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot = 1", "unknown key 'prot' in {path}; did you mean 'port'?"),
        ("[cashe]\nblock_size = 1", "unknown key 'cashe' in {path}; did you mean 'cache'?"),
        ("[cache]\nport = 1", "unknown key 'port' in {path}; allowed: block_size, "),
        ("port = 1\n[server]\nport = 2", "{path}: 'port' is given twice"),
        ("port = 1.5", "port in {path} is '1.5'; allowed: a whole number"),
        ("port = true", "port in {path} is 'true'; allowed: a whole number"),
        ("port = [1]", "{path}: port is [1]; allowed: a text, a number, true or false"),
        ("port = 70000", "port is 70000; allowed: 0 to 65535"),
        ("port = ", "the config file {path} is broken: "),
    ],
)
def test_wrong_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "headway.toml"
    path.write_text(text)
    assert refusal(capsys, "serve", "--config", str(path)).startswith(sentence.format(path=path))


def test_missing_or_misshapen_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refusal(capsys, "serve", "--config", str(tmp_path / "none.toml"))
    (tmp_path / "list.json").write_text("[1]")
    assert "it must map field names to values" in refusal(capsys, "serve", "--config", str(tmp_path / "list.json"))
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "is broken" in refusal(capsys, "serve", "--config", str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve", "--port", "1.5"], "--port is '1.5'; allowed: a whole number"),
        (["serve", "--port", "0x50"], "--port is '0x50'; allowed: a whole number"),
        (["serve", "--port", "70000"], "port is 70000; allowed: 0 to 65535"),
        (["serve", "--kv-memory-gb", "nan"], "--kv-memory-gb is 'nan'; allowed: a finite number"),
        (["serve", "--dtype", "int3"], "dtype is 'int3'; allowed: auto, float32, bfloat16, int8, q4"),
        (["serve", "--batching", "static:0"], "batching is 'static:0'; allowed: continuous, naive, static:8,"),
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["generate", "--prompt", "hi"], "Unknown option: --prompt; --help shows what this command takes."),
        (["serve", "a", "b"], "unexpected argument 'b'; --help shows what this command takes."),
        (["serve", "--port"], 'Command "serve" parameter --port requires an argument.'),
        (["serve", "--port", "1", "--port", "2"], "Parameter --port specified multiple times."),
        (["serf"], 'Unknown command "serf". Did you mean "serve"?'),
        (["generate", "--temperature", "3", "x"], "temperature is 3.0; allowed: 0 to 2"),
        (["generate", "--max-tokens", "0", "x"], "max_tokens is 0; allowed: 1 or more"),
        (["generate", "--file", "/no/such/file"], "cannot read prompts from /no/such/file"),
        (["chat", "--url", "ftp://x", "hi"], "url is 'ftp://x'; allowed: http://host:port or https://host"),
    ],
)
def test_wrong_flag_is_one_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    assert refusal(capsys, *argv).startswith(sentence)


def test_wrong_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "serve", environ={"HEADWAY_PORT": "x"}) == "HEADWAY_PORT is 'x'; allowed: a whole number"
    sentence = refusal(capsys, "serve", environ={"HEADWAY_PREFIX_CACHING": "maybe"})
    assert "HEADWAY_PREFIX_CACHING" in sentence


def test_sampling_flags_are_fields_of_sampling_params() -> None:
    known = {field.name for field in fields(SamplingParams)}
    assert {field.name for field in fields(BatchSampling)} <= known
    assert BatchSampling(n=2, stop=("x",), seed=1).given().items() >= {"n": 2, "stop": ("x",), "seed": 1}.items()
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}.isdisjoint(ChatSampling().given())


def test_sampling_defaults_come_from_flags_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text("default_top_p = 0.8\n[sampling]\ndefault_top_k = 20\n")
    values = resolved(capsys, "--config", str(tmp_path / "file.toml"), "--default-temperature", "0.5")
    found = (values["default_temperature"], values["default_top_p"], values["default_top_k"])
    assert found == (0.5, 0.8, 20)
    assert resolved(capsys, "--default-max-tokens", "99")["default_max_tokens"] == 99
    assert refusal(capsys, "serve", "--default-max-tokens", "0").startswith("default_max_tokens is 0; allowed: 1 or")
    sentence = refusal(capsys, "serve", "--default-top-p", "0")
    assert sentence == "default_top_p is 0.0; allowed: above 0, up to 1"
