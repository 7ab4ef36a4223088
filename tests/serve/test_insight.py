"""Explanations, cache lookups, sums per API key and metrics, over HTTP and the real engine."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo_engine import EchoEngine
from hash_engine import hash_engine
from headway.engine import decisions
from headway.engine.explain import Explanation, PreemptionNote, ReasonNote, WaitNote
from headway.serve import explain, history, insight
from headway.serve.history import History, ServedRequest
from headway.values.states import WaitReason
from serve_harness import Harness, serving
from tenant_kit import ANN, BOB, keys_file


def call(
    server: Harness, path: str, body: dict[str, Any] | None = None, key: str = "", **headers: str
) -> tuple[int, Any, Any]:
    data = None if body is None else json.dumps(body).encode()
    named = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {}), **headers}
    request = urllib.request.Request(server.url + path, data, named)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


BODY = {"prompt": list(range(1, 41)), "max_tokens": 8, "seed": 1}


def test_a_request_is_explained_by_either_of_its_names() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        asks = [{**BODY, "prompt": [i + 1] * 40, "n": 1 + i % 2} for i in range(40)]
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda body: call(server, "/v1/completions", body), asks))
        for status, answer, headers in answers:
            assert status == 200
            by_name = call(server, f"/v1/requests/{answer['id']}/explain")
            by_header = call(server, f"/v1/requests/{headers['x-request-id']}/explain")
            assert by_name[:2] == by_header[:2]
            assert by_name[0] == 200
            told = by_name[1]
            assert told["id"] == answer["id"]
            assert len(told["answers"]) == len(answer["choices"])
            for part in told["answers"]:
                assert part["state"] == "done"
                assert sum(part["parts_s"].values()) == pytest.approx(part["total_s"], rel=1e-6)
                assert part["words"][0].startswith("It took")
                assert part["device_s"] > 0
            slowest = max(part["total_s"] for part in told["answers"])
            assert answer["headway"]["total_ms"] == pytest.approx(1e3 * slowest, abs=0.001)
            assert answer["headway"]["device_ms"] > 0
            assert answer["headway"]["kv_block_seconds"] > 0


def test_answers_keep_their_index_when_others_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MOST_ENDED", 2)
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        _, answer, _ = call(server, "/v1/completions", {**BODY, "n": 4})
        told = call(server, f"/v1/requests/{answer['id']}/explain")[1]
        assert [part["index"] for part in told["answers"]] == [2, 3]
        assert told["num_answers"] == 4


def test_a_large_request_is_explained_in_part_and_one_question_is_asked_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(hash_engine(1), name="hash", max_n=16) as server:  # type: ignore[arg-type]
        _, answer, _ = call(
            server, "/v1/completions", {"prompt": [[i + 1] for i in range(8)], "max_tokens": 2, "n": 16}
        )
        told = call(server, f"/v1/requests/{answer['id']}/explain")[1]
        assert (len(told["answers"]), told["num_answers"]) == (insight.MOST_ANSWERS, 128)
        monkeypatch.setattr(insight, "_PATIENCE_S", 0.05)
        server.do(server.service.questions.acquire)
        for path, body in ((f"/v1/requests/{answer['id']}/explain", None), ("/v1/cache/lookup", {"tokens": [1, 2]})):
            status, said, headers = call(server, path, body)
            assert (status, said["error"]["code"]) == (503, "not_ready")
            assert "retry-after" in headers


def test_another_key_and_an_unknown_id_find_nothing() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        _, answer, headers = call(server, "/v1/completions", BODY, key="ann", **{"x-request-id": "same"})
        _, other, _ = call(server, "/v1/completions", BODY, key="bob", **{"x-request-id": "same"})
        for name in (answer["id"], "nothing", "%00", "a" * 5000):
            status, said, _ = call(server, f"/v1/requests/{name}/explain", key="bob")
            assert status in (404, 431)
            assert "error" in said
        assert call(server, "/v1/requests/same/explain", key="ann")[1]["id"] == answer["id"]
        assert call(server, "/v1/requests/same/explain", key="bob")[1]["id"] == other["id"]
        assert headers["x-request-id"] == "same"


def test_a_lookup_says_what_the_cache_has_and_changes_nothing() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        ask = {"tokens": BODY["prompt"]}
        assert call(server, "/v1/cache/lookup", ask)[1]["cached_tokens"] == 0
        call(server, "/v1/completions", BODY)
        for _ in range(2):
            said = call(server, "/v1/cache/lookup", ask)[1]
            assert (said["prompt_tokens"], said["cached_tokens"]) == (40, 39)
        assert call(server, "/v1/cache/lookup", {**ask, "cache_salt": "other"})[1]["cached_tokens"] == 0
        server.wait_idle()


def test_a_lookup_finds_nothing_of_another_tenant(tmp_path: Path) -> None:
    with serving(hash_engine(1), name="hash", keys=str(keys_file(tmp_path))) as server:  # type: ignore[arg-type]
        call(server, "/v1/completions", BODY, key=ANN)
        cached = [
            call(server, "/v1/cache/lookup", {"tokens": BODY["prompt"]}, key=key)[1]["cached_tokens"]
            for key in (ANN, BOB)
        ]
        assert cached == [39, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, -1]}, "tokens"),
        ({"tokens": [1], "prompt": "a"}, "tokens"),
        ({"tokens": [1], "cache_salt": "ä"}, "cache_salt"),
        ({"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_a_bad_lookup_names_the_field(body: dict[str, Any], param: str) -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        status, said, _ = call(server, "/v1/cache/lookup", body)
        assert status in (400, 404)
        assert said["error"]["param"] == param


def test_usage_sums_what_a_keys_requests_used() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        answers = [call(server, "/v1/completions", {**BODY, "n": 2}, key="ann")[1] for _ in range(3)]
        used = call(server, "/v1/usage", key="ann")[1]
        assert (used["requests"], used["answers"], used["completion_tokens"]) == (3, 6, 48)
        assert used["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in answers) == 3 * 40
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        assert used["cached_tokens"] == cached > 0
        assert used["device_seconds"] > 0
        assert used["finished"] == {"length": 6}
        assert call(server, "/v1/usage", key="bob")[1]["answers"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_usage_has_what_was_computed_for_a_client_that_left(n: int) -> None:
    with serving(EchoEngine(hold_after=3)) as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        body = {**BODY, "n": n, "max_tokens": 30, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": "Bearer ann"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        response.close()
        connection.close()
        deadline = time.monotonic() + 60
        while (used := call(server, "/v1/usage", key="ann")[1])["answers"] < n:
            assert time.monotonic() < deadline, used
            time.sleep(0.005)
        assert (used["requests"], used["prompt_tokens"]) == (1, 40)
        assert used["finished"] == {"abort": n}
        assert 1 <= used["completion_tokens"] <= n * 3
        server.wait_idle()


def test_a_long_key_is_not_kept_with_every_request() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        keys = ["k" * 20_000 + end for end in "ab"]
        _, answer, _ = call(server, "/v1/completions", BODY, key=keys[0])
        assert [call(server, f"/v1/requests/{answer['id']}/explain", key=key)[0] for key in keys] == [200, 404]
        served = server.service.history.find(answer["id"], next(iter(server.service.history._usage)))
        assert served is not None
        assert len(served.owner) < 100


def test_history_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_REQUESTS", 5)
    monkeypatch.setattr(history, "MOST_OWNERS", 3)
    kept = History()
    for i in range(20):
        kept.begin(ServedRequest(f"cmpl-{i}", f"req-{i}", f"owner-{i}", [i]))
    assert kept.find("req-14", "owner-14") is None
    assert kept.find("req-19", "owner-19") is not None
    assert (len(kept._requests), len(kept._names), len(kept._usage)) == (5, 5, 3)


def series(server: Harness) -> dict[str, float]:
    page = urllib.request.urlopen(server.url + "/metrics").read().decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_carry_both_sets_of_names_and_no_request_adds_a_series() -> None:
    with serving(hash_engine(1), name="hash") as server:  # type: ignore[arg-type]
        before = series(server)
        for i in range(20):
            call(server, "/v1/completions", {**BODY, "user": f"user{i}"}, key=f"key{i}", **{"x-request-id": f"r{i}"})
            call(server, f"/v1/nothing/{i}")
        after = series(server)
        assert before.keys() == after.keys()
        model = "[('engine', '0'), ('model_name', 'hash')]"
        assert after[f"vllm:prompt_tokens_total{model}"] == 20 * 40
        assert after[f"vllm:generation_tokens_total{model}"] == 20 * 8
        assert after[f"vllm:prefix_cache_hits_total{model}"] == 19 * 39
        assert after[f"vllm:spec_decode_num_draft_tokens_total{model}"] == after["headway_spec_tokens_drafted_total[]"]
        assert after[f"vllm:request_queue_time_seconds_count{model}"] == 20
        assert after["headway_queue_seconds_count[]"] == 20
        assert after["headway_slots_total[]"] == 16
        assert after["headway_inter_token_p99_over_p50[]"] >= 1.0
        reasons = [name for name in after if name.startswith("headway_wait_seconds_total")]
        assert len(reasons) == 9


def test_words_tell_waits_preemptions_and_predictions() -> None:
    told = Explanation(
        id=1,
        state="done",
        total_s=2.0,
        parts_s={"slots": 0.5, "prefill": 0.1, "decode": 1.2, "blocks": 0.2, "paused": 0.05},
        waits=[
            WaitNote(0.0, 0.5, [ReasonNote("slots", 5, 0.5)]),
            WaitNote(1.0, 0.2, [ReasonNote("blocks", 2, 0.2)]),
        ],
        num_chunks=3,
        preemptions=[PreemptionNote(7, 1.0, "memory", 90, False, 0.2)],
        finish="stop",
        num_overtaken=4,
        ttft_s=0.6,
        predicted_ttft_s=0.5,
    )
    said = " ".join(explain.words(told))
    for part in (
        "2 s in all",
        "every slot of the batch was taken",
        "4 requests that came later",
        "3 chunks",
        "blocks ran out",
        "too few KV blocks",
        "skipped steps",
        "500 ms were predicted",
    ):
        assert part in said


def test_every_wait_reason_has_words() -> None:
    assert {reason.name.lower() for reason in WaitReason} <= explain.REASONS.keys()
