"""`headway generate` as a process: at a terminal, in pipes, and interrupted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.cli.generate import Writer
from headway.cli.terminal import Bar, held_interrupts
from headway.llm import Answer, Completion
from pty_terminal import Terminal
from tiny_dir import write_tiny_model

COMMAND = (sys.executable, "-c", "import sys; from headway.cli.main import main; sys.exit(main())", "generate")
ENDLESS = 60_000  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, max_len=2 * ENDLESS)
    fields = {"model": folder, "cache-dir": folder / "cache", "num-blocks": 4000, "threads": 1, "temperature": 0}
    return [*(f"--{name}={value}" for name, value in fields.items()), "--ignore-eos"]


@contextmanager
def at_terminal(home: Path, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal("generate", *arguments, home=home, term="xterm")
    try:
        yield terminal
    finally:
        terminal.close()


def piped(flags: list[str], *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments, *flags], input=given, capture_output=True, text=True, check=False)


def test_an_answer_is_seen_long_before_its_end_and_an_interrupt_keeps_it(flags: list[str], tmp_path: Path) -> None:
    with at_terminal(tmp_path, "abc", f"--max-tokens={ENDLESS}", *flags) as terminal:
        terminal.until(r"loading \S+")
        terminal.until(r"(?s).{200}")
        assert terminal.process.poll() is None, "it must still be generating"
        terminal.type("\x03")
        assert terminal.process.wait(60) == 130
        assert "Traceback" not in terminal.rest()


def test_prompts_come_from_a_pipe_without_a_flag(flags: list[str]) -> None:
    one = piped(flags, "--max-tokens=6", given="abc\n")
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == piped(flags, "abc", "--max-tokens=6").stdout
    two = piped(flags, "--max-tokens=6", "--output=jsonl", given="abc\n\nb a\n")
    assert [json.loads(line)["prompt"] for line in two.stdout.splitlines()] == ["abc", "b a"]


def test_jsonl_and_text_hold_the_same_answers(flags: list[str]) -> None:
    lines = piped(flags, "abc", "b", "--max-tokens=6", "--output=jsonl").stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer.pop("prompt") for answer in answers] == ["abc", "b"]
    text = "".join(f"{answer.pop('text')}\n" for answer in answers)
    assert answers == [{"finish_reason": "length", "tokens": 6}] * 2
    assert piped(flags, "abc", "b", "--max-tokens=6", "--output=text").stdout == text


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        ([], "\n \n", "standard input holds no prompt"),
        (["--file", "/nowhere.txt"], None, "cannot read prompts from /nowhere.txt"),
        (["a", "--output", "xml"], None, 'Choose from: "text", "jsonl"'),
        (["a", "--output", "text", "--json"], None, "both given; choose one"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], given: str | None, said: str) -> None:
    done = piped([], *arguments, given=given)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_no_prompt_at_a_terminal_says_how_to_give_one(tmp_path: Path) -> None:
    with at_terminal(tmp_path) as terminal:
        terminal.until("no prompt was given; name one")
        assert terminal.process.wait(60) == 2


def test_an_interrupt_keeps_what_is_answered_in_order(flags: list[str]) -> None:
    prompts = [f"prompt {number}" for number in range(300)]
    command = [*COMMAND, *prompts, "--max-tokens=400", "--max-num-seqs=1", "--output=jsonl", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    found = [json.loads(line)["prompt"] for line in (first + out).splitlines()]
    assert process.returncode == 130
    assert found == prompts[: len(found)]
    assert err == (
        f"headway: interrupted; {len(found)} of 300 prompts are answered, and nothing of the others is kept\n"
    )


def test_a_reader_that_leaves_ends_it_without_a_word(flags: list[str]) -> None:
    command = [*COMMAND, *map(str, range(300)), "--max-tokens=400", "--max-num-seqs=1", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(120) == 1


def test_a_short_output_that_no_one_reads_ends_without_a_word_too() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "headway.cli.main", "--version"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_several_prompts_have_a_bar_that_is_gone_at_the_end(flags: list[str], tmp_path: Path) -> None:
    with at_terminal(tmp_path, "abc", "b", "--max-tokens=40", *flags) as terminal:
        terminal.until("generating")
        terminal.until(r"\[1/2\] ")
        terminal.until(r"\[2/2\] ")
        assert terminal.process.wait(60) == 0
    quiet = piped(flags, "abc", "b", "--max-tokens=4")
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_pipe_at_a_terminal_has_no_bar_that_its_reader_would_write_into(flags: list[str], tmp_path: Path) -> None:
    command = shlex.join([*COMMAND, "abc", "b", "--max-tokens=4", "--output=jsonl", *flags])
    terminal = Terminal(home=tmp_path, term="xterm", command=["sh", "-c", f"{command} | cat"])
    try:
        assert terminal.process.wait(60) == 0
        seen = terminal.rest()
    finally:
        terminal.close()
    assert "generating" not in seen
    assert seen.count('"finish_reason": "length"') == 2


def test_no_colour_is_written_into_a_pipe_or_where_it_is_not_wanted(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--help"], ["abc", "b", "--max-tokens=4", *flags]):
        assert "\x1b" not in piped([], *arguments).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    with at_terminal(tmp_path, "--help") as terminal:
        assert terminal.process.wait(60) == 0
        assert not re.findall(r"\x1b\[[0-9;]*3[0-9]", terminal.rest())


def _completion(text: str) -> Completion:
    return Completion(text, [1], [Answer(0, text.upper(), [1, 2], None, "stop")], 0, None)


def test_answers_are_written_in_the_order_of_their_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(["a", "b", "c", "d"], "text")
    for index in (2, 0):
        writer.add(index, _completion("abcd"[index]), Bar())
    assert capsys.readouterr().out == "A\n", "c waits for b"
    assert writer.flush(Bar()) == 2
    assert capsys.readouterr().out == "C\n", "b never came"


def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_does_not() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with held_interrupts() as check:
        check()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
