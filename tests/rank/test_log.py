from __future__ import annotations

import json
import logging
import random
import threading
from pathlib import Path

import pytest

from headway.bench.answers import Asked, Reply, collect, read_prompts
from headway.bench.ranking import judge, replay
from headway.cli.main import main
from headway.errors import ConfigError
from headway.rank.log import Entry, Recorder, RequestLog, read_log
from headway.rank.offline import fit, split
from headway.values.params import SamplingParams
from planted import MOST, WORDS

GOOD = {"tokens": [1, 2], "max_tokens": 9, "num_output": 3, "finish": "stop"}


def planted_log(path: Path, count: int, seed: int = 0) -> list[Entry]:
    rng, log, entries = random.Random(seed), RequestLog(path), []
    for at in range(count):
        word = rng.choice(list(WORDS))
        tokens = [word, *(rng.randrange(1000, 30_000) for _ in range(30))]
        num_output = min(MOST, max(1, round(WORDS[word] * rng.lognormvariate(0, 0.3))))
        finish = "length" if num_output == MOST else "stop"
        entries.append(Entry(tokens, MOST, num_output, finish, at=at / 7, route="chat"))
        log.write(entries[-1])
    log.close()
    return entries


def test_what_is_written_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(path)
    late = Entry([1], 9, 9, "length", at=5.0, tenant="ann", route="chat", temperature=0.0, has_stop=True)
    early = Entry([], 9, 0, "abort", at=1.0, ignore_eos=True)
    for entry in (late, early):
        log.write(entry)
    assert read_log(path) == [early, late], "before it is closed"
    log.close()
    assert [entry.is_cut for entry in read_log(path)] == [True, True]
    assert late.sample().features.dense.tolist() != early.sample().features.dense.tolist()


def test_a_recorder_never_blocks_and_counts_what_it_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, goes_on, has_begun = tmp_path / "log.jsonl", threading.Event(), threading.Event()

    def slow() -> Entry:
        has_begun.set()
        assert goes_on.wait(20)
        return Entry([1], 9, 1, "stop")

    recorder = Recorder(path, backlog=2)
    recorder.record(slow)
    assert has_begun.wait(20)
    for count in range(2, 7):
        recorder.record(lambda count=count: Entry([1], 9, count, "stop"))  # type: ignore[misc]
    goes_on.set()
    recorder.close()
    recorder.close()
    assert [entry.num_output for entry in read_log(path)] == [1, 2, 3]
    assert recorder.num_dropped == 3
    assert "3 requests are missing" in caplog.text


def test_a_log_that_fails_ends_and_nothing_else_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    recorder = Recorder(path)
    recorder.record(lambda: Entry([1], 9, 1, "stop"))
    for _ in range(3):
        recorder.record(lambda: Entry([1], 9, -1, "stop"))
    recorder.record(lambda: Entry([1], 9, 2, "stop"))
    recorder.close()
    assert [entry.num_output for entry in read_log(path)] == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "said once"


def test_a_full_disk_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"))
    recorder.record(lambda: Entry([1], 9, 1, "stop"))
    recorder.close()
    assert "No space left" in caplog.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 of the request log"),
        ("[]", "is no object"),
        (json.dumps({"tokens": [1]}), "max_tokens, num_output, finish is missing"),
        (json.dumps({**GOOD, "text": "hi"}), "unknown key 'text'; allowed: tokens,"),
        (json.dumps({**GOOD, "tokens": "hi"}), "tokens is 'hi'; allowed: a list of token ids"),
        (json.dumps({**GOOD, "tokens": [1.5]}), "a list of token ids"),
        (json.dumps({**GOOD, "num_output": -1}), "num_output is '-1'; allowed: 0 or more"),
        (json.dumps({**GOOD, "finish": "done"}), "finish is 'done'; allowed: stop, length, abort"),
        (json.dumps({**GOOD, "max_tokens": 0}), "max_tokens is 0; allowed: 1 or more"),
        (json.dumps({**GOOD, "temperature": "hot"}), "temperature is 'hot'"),
        (json.dumps({**GOOD, "at": None}), "at is 'None'; allowed: seconds"),
        (json.dumps({**GOOD, "route": 3}), "route is '3'; allowed: a text"),
    ],
)
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_log(path)
    assert "line 2" in str(caught.value)
    assert says in str(caught.value)


def test_ranker_gets_most_of_the_oracles_gain_where_words_predict_lengths(tmp_path: Path) -> None:
    entries = planted_log(tmp_path / "log.jsonl", 1200)
    earlier, _ = split([entry.sample() for entry in entries], 0.3)
    report = judge(fit(earlier), entries[: len(earlier)], entries[len(earlier) :], load=1.5, slots=8)
    assert report.tau >= 0.6
    assert report.tau_plain == 0.0
    assert 0.85 <= report.coverage <= 0.95
    fcfs, plain, ranked, oracle = report.orders
    assert (fcfs.share, oracle.share) == (0.0, 1.0)
    assert oracle.mean_s < ranked.mean_s < 0.9 * fcfs.mean_s
    assert ranked.share >= 0.8
    assert plain.share < 0.5


def test_replay_is_the_same_every_time_and_gains_nothing_without_a_queue(tmp_path: Path) -> None:
    entries = planted_log(tmp_path / "log.jsonl", 100)
    guesses = [float(entry.num_output) for entry in entries]
    assert replay(entries, guesses, guesses, load=0, slots=4) == replay(entries, guesses, guesses, load=0, slots=4)
    idle = replay(entries, guesses, guesses, load=0.01, slots=100)
    assert [each.share for each in idle] == [0.0] * 4


def test_fit_and_eval_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, state, again = tmp_path / "log.jsonl", tmp_path / "ranker.npz", tmp_path / "again.npz"
    planted_log(log, 600)
    for path in (state, again):
        assert main(["rank", "fit", str(log), "--state", str(path)], {}) == 0
    assert "learned from 600 requests" in capsys.readouterr().out
    assert state.read_bytes() == again.read_bytes()
    assert main(["rank", "eval", str(log), "--state", str(state), "--slots", "4", "--load", "2", "--json"], {}) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["tau"] > 0.5
    assert record["orders"][0]["order"] == "fcfs"
    assert main(["rank", "eval", str(log), "--no-routes", "--loss", "list"], {}) == 0
    assert "180 held-out requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["eval", "LOG", "--held-out", "1.5"], "held_out is 1.5; allowed: above 0, below 1"),
        (["eval", "LOG", "--slots", "0"], "1 slot or more"),
        (["eval", "LOG"], "the log has 10 requests; at least 128 to learn from"),
        (["fit", "LOG", "--state", "x.npz"], "the log has 10 requests"),
        (["eval", "missing.jsonl"], "cannot read the request log missing.jsonl"),
        (["fit", "LOG"], "--state"),
        (["answers", "--log", "x.jsonl"], "no file with prompts was given"),
    ],
)
def test_what_is_wrong_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    planted_log(tmp_path / "log.jsonl", 10)
    given = [str(tmp_path / "log.jsonl") if arg == "LOG" else arg for arg in args]
    assert main(["rank", *given], {}) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rank", "rank fit", "rank eval", "rank answers"])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"], {}) == 0
    out = capsys.readouterr().out
    assert f"\n  headway {command}" in out.partition("Examples:")[2]


def test_prompts_are_found_in_the_forms_people_publish(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"question": "b", "answer": "no"},
        {"question": [[{"role": "user", "content": "c"}]]},
        {"turns": ["d", "not this"]},
        {"instruction": "e", "instances": [{"input": "f", "output": "no"}]},
        {"query": "g"},
        {"messages": [{"role": "system", "content": "h"}, {"role": "user", "content": "i"}]},
        "j",
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "plain.txt").write_text("k\n\nl\n")
    squad = {"data": [{"paragraphs": [{"context": "m", "qas": [{"question": "n"}, {"question": "o"}]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    asked = read_prompts([tmp_path / name for name in ("lines.jsonl", "plain.txt", "squad.json")], seed=1)
    wanted = ["a", "b", "c", "d", "e\n\nf", "g", "h\n\ni", "j", "k", "l", "m\n\nn", "m\n\no"]
    assert sorted(one.text for one in asked) == wanted
    assert [one.route for one in asked if one.text == "k"] == ["plain"]
    assert asked == read_prompts([tmp_path / name for name in ("lines.jsonl", "plain.txt", "squad.json")], seed=1)
    (tmp_path / "none.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ConfigError, match="has no prompts; allowed: lines of text, or JSON with one of prompt"):
        read_prompts([tmp_path / "none.jsonl"], seed=1)
    with pytest.raises(ConfigError, match="cannot read prompts"):
        read_prompts([tmp_path / "missing.txt"], seed=1)


def test_a_collection_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, asked = tmp_path / "log.jsonl", [Asked(f"prompt {number}", "some") for number in range(100)]
    seen: list[str] = []

    def answer(texts: list[str]) -> list[Reply]:
        seen.extend(texts)
        return [Reply([len(text)], 5, "stop") for text in texts]

    params = SamplingParams(max_tokens=8)
    for deadline, wanted in ((float("-inf"), 0), (float("inf"), 100), (float("inf"), 100)):
        count = collect(answer, asked, path, params, deadline=deadline, on_progress=lambda done: None)  # type: ignore[arg-type]
        assert count == wanted
    assert seen == [one.text for one in asked]
    assert [entry.at for entry in read_log(path)] == list(range(100))
