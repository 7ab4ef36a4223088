"""The errors of the command line for shares over a policy with a global order, and for options."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gguf_files
from headway.cli.main import main

WHOLE = ("srpt", "mlfq", "lpm", "priority")
SHARES = {"fair": ["--fair"], "lanes": ["--lanes", "interactive=80,batch=20"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    path = gguf_files.write(folder / "tiny.gguf", *gguf_files.tiny_model())
    return ["--model", str(path), "--cache-dir", str(folder / "cache"), "--num-blocks", "64", "--threads", "1"]


def _sentence(name: str) -> str:
    return (
        f"headway: policy '{name}' orders all waiting requests together; it cannot be used within lanes or tenants: "
        "take fcfs, sjf, ltr, edf, slo or hrrn, or leave out fair and lanes\n"
    )


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", WHOLE)
def test_shares_over_a_policy_of_the_whole_queue_are_refused(
    capsys: pytest.CaptureFixture[str], model: list[str], name: str, shares: str
) -> None:
    assert main(["generate", "abc", *model, "--policy", name, *SHARES[shares]], {}) == 2
    assert capsys.readouterr() == ("", _sentence(name))


def test_a_server_refuses_them_too(model: list[str]) -> None:
    flags = ["--port", "0", "--log-level", "error", "--policy", "mlfq", *SHARES["lanes"]]
    command = [sys.executable, "-m", "headway.cli.main", "serve", *model, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", _sentence("mlfq"))


@pytest.mark.parametrize("shares", SHARES)
def test_shares_over_another_policy_are_not(capsys: pytest.CaptureFixture[str], model: list[str], shares: str) -> None:
    flags = ["--max-tokens", "2", "--ignore-eos", "--policy", "hrrn", *SHARES[shares]]
    assert main(["generate", "abc", *model, *flags], {}) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("lpm", "quantum=0", "quantum is 0; allowed: a number of at least 0.000001"),
        ("fcfs", "share_every=x", "share_every is 'x'; allowed: a whole number of at least 0"),
    ],
)
def test_an_impossible_option_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], model: list[str], policy: str, options: str, said: str
) -> None:
    assert main(["generate", "abc", *model, "--policy", policy, "--policy-options", options], {}) == 2
    assert capsys.readouterr() == ("", f"headway: policy_options {said}\n")
