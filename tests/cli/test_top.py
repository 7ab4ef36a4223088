"""`headway top` against a real server that works."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest

from hash_engine import hash_engine
from headway.cli import top
from headway.cli.main import main
from serve_harness import Harness, serving


def ask(server: Harness) -> None:
    body = json.dumps({"prompt": list(range(1, 41)), "max_tokens": 20}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
    urllib.request.urlopen(request).read()


def keep_asking(server: Harness, is_over: threading.Event) -> None:
    while not is_over.is_set():
        ask(server)


def test_one_look_has_rates_and_latencies_of_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        ask(server)
        is_over = threading.Event()
        working = threading.Thread(target=keep_asking, args=(server, is_over))
        working.start()  # and goes on throughout the interval, however slow or fast the machine is
        try:
            assert main(["top", "--url", server.url, "--interval", "1.5", "--once", "--json"]) == 0
        finally:
            is_over.set()
            working.join()
        seen = json.loads(capsys.readouterr().out)
        assert seen["slots"] == 16
        assert seen["requests_per_s"]["length"] > 0
        assert seen["tokens_per_s"] > 0
        assert 0 < seen["itl_ms"]["p50"] <= seen["itl_ms"]["p99"]
        assert seen["cache_hit_rate"] > 0.5
        assert main(["top", "--url", server.url, "--interval", "0.1", "--once"]) == 0
        text = capsys.readouterr().out
        assert "of 16 slots" in text
        assert "\x1b" not in text, "no codes for a screen in a pipe"


def test_a_counter_that_began_anew_is_not_negative() -> None:
    base = {("headway_requests_running", ""): 1.0, ("headway_tokens_generated_total", ""): 500.0}
    seen = top.view(base, {**base, ("headway_tokens_generated_total", ""): 20.0}, 2.0)
    assert seen["tokens_per_s"] == 10.0


def test_quantiles_are_of_what_came_since() -> None:
    def buckets(*counts: float) -> dict[tuple[str, str], float]:
        return {("headway_x_bucket", le): count for le, count in zip(("0.1", "1", "+Inf"), counts, strict=True)}

    assert top.quantiles(buckets(50, 50, 50), buckets(50, 50, 50), "x") is None
    found = top.quantiles(buckets(1000, 1000, 1000), buckets(1000, 1010, 1010), "x")
    assert found == {"p50": 550.0, "p99": 991.0}
    assert top.quantiles({}, buckets(0, 0, 4), "x") == {"p50": 1000.0, "p99": 1000.0}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--interval", "0"], 2, "allowed: 0.1 to 3600"),
        (["--url", "ftp://a"], 2, "allowed: http://"),
        (["--url", "http://127.0.0.1:9"], 1, "cannot reach"),
    ],
)
def test_faults_are_one_sentence(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_server_of_another_kind_is_named() -> None:
    with pytest.raises(top.EngineError, match="no headway metrics"):
        top.view({}, top.parse("vllm:num_requests_running 3\n"), 1.0)
