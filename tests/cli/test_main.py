"""The command as a process: quick to start, quiet, and honest about how it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.main import main

COMMANDS = ["serve", "chat", "generate", "models", "verify", "completion", "doctor", "bench"]
COMMANDS += ["bench scheduler", "bench kv", "bench route", "simulate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"], {}) == 0
    out = capsys.readouterr().out
    assert f"Usage: headway {command}" in out
    assert f"\n  headway {command}" in out.partition("Examples:")[2]


@pytest.mark.parametrize(
    ("command", "argument", "meaning"),
    [
        ("generate", "PROMPTS...", "Texts to go on with"),
        ("chat", "MESSAGE", "Say this"),
        ("serve", "MODEL", "The model"),
        ("verify", "MODEL", "A bundled name"),
    ],
)
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_names_the_argument_of_a_command(
    command: str, argument: str, meaning: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, flag], {}) == 0
    out = capsys.readouterr().out
    assert f"Usage: headway {command} [OPTIONS] [{argument}]\n" in out
    assert re.search(rf"{argument.rstrip('.')} .*{meaning}", out)


def test_paragraphs_of_help_are_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["bench", "serve", "--help"], {}) == 0
    text = capsys.readouterr().out.partition("\n\n")[2]
    about = text.partition("Without --url")[2].partition("╭")[0].strip().splitlines()
    assert len(about) > 3
    assert all(44 <= len(line.rstrip()) <= 60 for line in about[:-1]), about


def test_help_and_print_config_import_nothing_heavy() -> None:
    code = (
        "import sys; from headway.cli.main import main; main(['--help'], {}); main(['serve', '--print-config'], {}); "
        "print(sorted({'torch', 'numpy', 'starlette', 'uvicorn', 'tokenizers', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_wrong_flag_ends_the_process_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--prot", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headway: Unknown option: --prot. Did you mean --port?\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_sentence() -> None:
    command = [sys.executable, "-m", "headway.cli.main", "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "headway: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("command", ["bench", "bench policy", "bench scheduler", "models", "models pull", "rank"])
def test_every_command_takes_help_all_and_shows_no_twin_of_a_list(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help-all"], {}) == 0
    assert "--empty" not in capsys.readouterr().out


def test_models_list_is_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = []
    for argv in (["models"], ["models", "list"]):
        assert main([*argv, "--cache-dir", str(tmp_path)], {}) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert main(["models", "lsit"], {}) == 2
    assert "pull, rm" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"], {}) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("headway.cli.chat.choose_model", lambda *args: "tiny")
    assert main(["chat", "--url", "http://127.0.0.1:1"], {}) == 130
    assert capsys.readouterr().err == ""


def test_a_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "completion"
    assert main(["completion", "bash"], {}) == 0
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> list[str]:
        typed = " ".join(words)
        ask = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _headway; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", ask], check=True, capture_output=True, text=True).stdout.split()

    assert complete("headway", "se") == ["serve"]
    assert "--target-itl-ms" in complete("headway", "serve", "--tar")
    assert main(["completion", "tcsh"], {}) == 2


def test_only_the_command_that_is_called_is_imported() -> None:
    code = (
        "import sys; from headway.cli.main import main; main(['serve', '--print-config'], {}); "
        "print([name for name in ('chat', 'generate', 'bench', 'doctor') if f'headway.cli.{name}' in sys.modules], "
        "'http.client' in sys.modules, 'headway.cli.serve' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] False True"
