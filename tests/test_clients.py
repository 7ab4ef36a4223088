"""What docs/clients.md says about clients of other projects: its table is of the versions that tools/clients runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from clients import run
from serve_harness import serving

PAGE = (Path(__file__).parents[1] / "docs" / "clients.md").read_text()


def rows() -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in cells[1:]}


@pytest.mark.parametrize("client", run.CLIENTS, ids=lambda client: client.key)
def test_the_table_has_every_client_in_the_version_that_is_run(client: run.Client) -> None:
    version, _, num_requests, result = rows()[client.title]
    (pin,) = [each for each in (*client.packages, *client.bare) if each.startswith(version.split()[0])][:1]
    assert re.split("==|@", pin)[1] == version.split()[1]
    assert int(num_requests) > 0
    assert result == "works"
    assert (run.HERE / client.script).is_file()


def test_the_table_has_no_other_rows() -> None:
    assert rows().keys() == {client.title for client in run.CLIENTS}


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    with serving(name="smollm2-135m-instruct") as server:
        exec(example.replace("http://127.0.0.1:8000", server.url), {})  # noqa: S102
    assert len(capsys.readouterr().out.strip()) == 32


def test_a_client_runs_against_a_server_of_its_own(tmp_path: Path) -> None:
    """With the client that is installed here; the runner gets the others from registries."""
    outcome, log, openai = run.Outcome(), tmp_path / "server.log", run.CLIENTS[0]
    tokenizer, model = run._write_tokenizer(tmp_path / "tokenizer")
    with run._server(log) as url:
        run._run_script(openai, Path(sys.prefix), [url, model, str(tokenizer), str(tmp_path)], outcome)
    run._read_log(openai, log, outcome)
    assert outcome.faults == []
    assert {"chat", "chat, streamed", "completions", "completions, streamed"} <= set(outcome.ran)
    assert outcome.num_requests == 22


def test_what_the_server_says_about_a_client_counts(tmp_path: Path) -> None:
    lines = [
        '{"message": "unknown field \'mood\' is ignored"}',
        '{"message": "", "method": "POST", "path": "/v1/completions", "status": 400}',
        '{"message": "", "method": "POST", "path": "/v1/completions", "status": 404}',
        "no JSON",
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    outcome = run.Outcome(answers=[("chat", "question", "a"), ("other", "question", "b")])
    run._read_log(run.CLIENTS[0], tmp_path / "log", outcome)
    run._compare({"openai": outcome})
    assert outcome.faults == [
        "unknown field 'mood' is ignored",
        "POST /v1/completions got 400",
        "other says 'b', others 'a'",
    ]
    assert outcome.num_requests == 2
