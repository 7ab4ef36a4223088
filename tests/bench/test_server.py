"""`bench startup` and `bench serve` with real server processes, and a client that notices what goes wrong."""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.bench import device_serve, server
from headway.bench.client import Target, run_streams
from headway.bench.latency import percentile
from headway.bench.server import ServerProcess, family
from headway.bench.workload import WorkItem
from headway.cli.main import main
from headway.errors import ConfigError, EngineError
from tiny_dir import write_tiny_model

GOOD = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
STOPPED = GOOD.replace(b"length", b"stop")
SERVER = """
import http.server
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
ready = http.server.HTTPServer(("127.0.0.1", 0), Ready)
print(f"at http://127.0.0.1:{ready.server_port}", flush=True)
ready.serve_forever()
"""
BROKEN = b"HTTP/1.1 503 Service Unavailable\r\n\r\nno room today"


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[Target, list[bytes]]]:
    """A server that gives every request the same answer, and keeps the requests."""
    asked: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(65536))
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        port = listener.server_address[1]
        yield Target.of(f"http://127.0.0.1:{port}", "m", "key"), asked
        listener.shutdown()


def test_serve_bench_prints_both_sides(flags: list[str], last_line: Callable[[], dict[str, Any]]) -> None:
    command = ["bench", "serve", "--workload", "uniform", "--requests", "5", "--streams", "2", "--rounds", "1"]
    assert main([*command, "--json", *flags], {}) == 0
    record = last_line()
    assert (record["n"], record["streams"], record["in_tok"], record["rounds"]) == (5, 2, 150, 1)
    assert record["ratio"] == pytest.approx(record["out_tok_s"] / record["offline_tok_s"], rel=0.02)
    assert 0 < record["itl_ms"]["p50"] <= record["itl_ms"]["p99"]
    assert record["gap_ms"] == record["itl_ms"]
    assert 0 < record["ttft_ms"]["p90"] < record["e2e_ms"]["p90"] <= record["e2e_ms"]["p99"]
    assert 0 <= record["goodput"] <= 1
    assert (record["slo"], record["failed"]) == ({"ttft_ms": 1000.0, "itl_ms": 100.0}, 0)
    assert record["client_us_per_token"] > 0


def test_startup_bench_starts_over_an_empty_and_then_a_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_line: Callable[[], dict[str, Any]]
) -> None:
    seen = tmp_path / "seen"
    note = "folder = sys.argv[-1].partition('=')[2]; leave = open(folder + '/left', 'a')\n"
    note += f"print(sys.argv[1:], leave.tell(), file=open({str(seen)!r}, 'a')); leave.write('x'); leave.close()\n"
    monkeypatch.setattr(server, "COMMAND", (sys.executable, "-c", "import sys\n" + note + SERVER))
    assert main(["bench", "startup", "--rounds", "2", "--model", "m", "--cache-dir", "/mine", "--json"], {}) == 0
    record = last_line()
    assert [start["cache"] for start in record["starts"]] == ["empty", "warm"] * 2
    assert record["empty_s"] > 0
    assert record["warm_rss_mb"] > record["warm_pss_mb"] > 2
    lines = seen.read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["0", "1", "0", "1"]
    folders = [line.partition("--cache-dir=")[2].partition("'")[0] for line in lines]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not any(Path(folder).exists() for folder in folders)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no model .*nothing"), ServerProcess([f"--model={missing}"]):
        pass


def test_children_that_outlive_the_server_are_ended_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    monkeypatch.setattr(server, "COMMAND", (sys.executable, "-c", orphan + SERVER))
    children: list[int] = []

    def start_and_stop() -> None:
        with ServerProcess([]) as running:
            children.extend(family(os.getpid())[1:])
            assert running.resident_bytes() > 5_000_000

    with pytest.raises(EngineError, match="left the processes"):
        start_and_stop()
    assert len(children) == 2
    assert not set(family(os.getpid())) & set(children)


def test_client_takes_whole_answers_only() -> None:
    works = [WorkItem([1, 2, 3], 4), WorkItem([5], 6)]
    with answering(GOOD) as (target, asked):
        streams = run_streams(target, works, streams=2, salt="s-1")
        assert all(len(stream.arrivals) == 1 and stream.first_s > 0 for stream in streams)
        assert sum(b'"prompt": [1, 2, 3], "max_tokens": 4' in request for request in asked) == 1
        assert all(b'"cache_salt": "s-1"' in request and b"Bearer key" in request for request in asked)
    for bad in (STOPPED, BROKEN, GOOD.replace(b"[DONE]", b"")):
        with answering(bad) as (target, asked), pytest.raises(EngineError, match="ended early"):
            run_streams(target, works[:1], streams=1, salt="s")


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values[:1], 99)) == (51.0, 100.0, 1.0)
    assert percentile([], 50) == 0.0


def test_streams_from_several_processes_reach_a_server_with_made_up_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    work = [json.dumps({"tokens": [40 + i, 50], "max_tokens": 3 + i}) for i in range(5)]
    (tmp_path / "work.jsonl").write_text("\n".join(work))
    given = {"model": tmp_path, "workload": tmp_path / "work.jsonl", "device": "cpu", "requests": 4, "streams": 3}
    given |= {"processes": 2, "rounds": 1, "blocks": 60, "max-len": 128, "offline": 1.0}
    device_serve.main([word for name, value in given.items() for word in (f"--{name}", str(value))])
    said = capsys.readouterr().out
    assert "output tok/s over 3 streams from 2 processes" in said
    assert " offline" in said
