"""Scheduling fields of a request reach the engine, and its timings reach the client."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from echo_engine import EchoEngine
from hashing import HashExecutor
from headway.control.costs import CostModel, CostWeights
from headway.control.forecast import Backlog
from headway.control.slo_admission import SloAdmission
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.scheduler import Scheduler
from headway.engine.client import EngineInfo
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.metrics import EngineMetrics
from headway.policies.slo import SloAware
from headway.serve.intent import TIERS
from headway.values.limits import Limits
from headway.values.params import NO_SLO, Slo
from headway.values.plan import StepResult
from serve_harness import Harness, serving

PARTS = ("queue_ms", "prefill_ms", "decode_ms", "preempted_ms")


def post(server: Harness, body: dict[str, Any], **headers: str) -> Any:
    data = json.dumps({"prompt": "abc", "temperature": 0, "max_tokens": 4, **body}).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", data, headers))


def submitted(server: Harness, body: dict[str, Any], **headers: str) -> Any:
    post(server, body, **headers).read()
    return server.engine.submits[-1]


@pytest.mark.parametrize(
    ("body", "priority", "echoed"),
    [
        ({}, 0, None),
        ({"service_tier": None}, 0, None),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "priority"}, -1, "priority"),
        ({"service_tier": "flex"}, 1, "flex"),
        ({"service_tier": "batch"}, 1, "batch"),
        ({"service_tier": "batch", "priority": -3}, -3, "batch"),
        ({"priority": 100}, 100, None),
    ],
)
def test_a_tier_gives_a_priority_and_is_echoed(
    server: Harness, body: dict[str, Any], priority: int, echoed: str | None
) -> None:
    answer = json.load(post(server, body))
    submit = server.engine.submits[-1]
    assert (submit.priority, submit.lane, submit.route) == (priority, "", "completions")
    assert answer.get("service_tier", None) == echoed


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (
            ("interactive", "batch"),
            {"auto": "interactive", "priority": "interactive", "flex": "batch", "batch": "batch"},
        ),
        (("quick", "interactive"), {"default": "interactive", "flex": "quick"}),
        (("quick", "slow"), dict.fromkeys(TIERS, "quick")),
    ],
)
def test_a_lane_that_is_not_there_is_the_first(lanes: tuple[str, ...], expected: dict[str, str]) -> None:
    engine = EchoEngine()
    engine.info = EngineInfo("echo", 512, 320, 16, 4096, 64, (0,), lanes=lanes)
    with serving(engine) as server:
        assert {tier: submitted(server, {"service_tier": tier}).lane for tier in expected} == expected


def test_the_tenant_is_the_user_or_the_key_and_the_salt_is_neither(server: Harness) -> None:
    key = {"Authorization": "Bearer secret-1"}
    assert submitted(server, {"user": "ann"}, **key).tenant == "ann"
    first, again, other = (
        submitted(server, {"cache_salt": "s"}, Authorization=f"Bearer {name}")
        for name in ("secret-1", "secret-1", "secret-2")
    )
    assert first.tenant == again.tenant != other.tenant
    assert "secret" not in first.tenant
    assert (first.salt, submitted(server, {"user": "ann"}).salt) == ("s", "")
    assert submitted(server, {}).tenant == ""
    long = [submitted(server, {"user": "u" * 5000 + end}).tenant for end in ("a", "b")]
    assert long[0] != long[1]
    assert len(long[0]) < 64


def test_a_request_may_leave_speculation_out(server: Harness) -> None:
    asked = ({}, {"speculation": None}, {"speculation": "auto"}, {"speculation": "off"})
    assert [submitted(server, body).speculates for body in asked] == [True, True, True, False]


def test_an_objective_is_given_in_milliseconds_and_kept_in_seconds(server: Harness) -> None:
    asked = {"ttft_ms": 250, "itl_ms": 40.5, "deadline_ms": 9000}
    assert submitted(server, {"slo": asked}).slo == Slo(0.25, 0.0405, 9.0)
    assert submitted(server, {"slo": {"itl_ms": 50, "ttft_ms": None}}).slo == Slo(itl=0.05)
    assert submitted(server, {"slo": {}}).slo == submitted(server, {"slo": None}).slo == NO_SLO


@pytest.mark.parametrize(
    ("body", "param", "allowed"),
    [
        ({"service_tier": "scale"}, "service_tier", "'scale'; allowed: auto, default, priority, flex, batch"),
        ({"service_tier": ""}, "service_tier", "allowed: auto"),
        ({"service_tier": 3}, "service_tier", "str"),
        ({"priority": 101}, "priority", "101; allowed: -100 to 100"),
        ({"priority": -101}, "priority", "allowed: -100 to 100"),
        ({"priority": 1.5}, "priority", "int"),
        ({"slo": {"ttft": 3}}, "slo", "'ttft'; allowed: ttft_ms, itl_ms, deadline_ms"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "0; allowed: milliseconds above 0"),
        ({"slo": {"itl_ms": -1}}, "slo.itl_ms", "allowed: milliseconds above 0"),
        ({"slo": {"deadline_ms": 1e9}}, "slo.deadline_ms", "up to a day"),
        ({"slo": {"ttft_ms": "fast"}}, "slo", "float"),
        ({"slo": 200}, "slo", "object"),
        ({"user": 3}, "user", "str"),
        ({"speculation": "on"}, "speculation", "'on'; allowed: auto, as the server is set up, and off"),
        ({"speculation": False}, "speculation", "str"),
    ],
)
def test_bad_intent_is_refused_with_what_is_allowed(
    server: Harness, body: dict[str, Any], param: str, allowed: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, body)
    assert caught.value.code == 400
    error = json.load(caught.value)["error"]
    assert error["param"] == param
    assert allowed in error["message"]


def test_the_real_client_reads_tier_and_report(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "hi"}],
        service_tier="flex",
        user="ann",
        max_tokens=4,
        extra_body={"slo": {"ttft_ms": 500}},
    )
    assert answer.service_tier == "flex"
    report = (answer.model_extra or {})["headway"]
    assert sum(report[part] for part in PARTS) == pytest.approx(report["total_ms"], rel=0.01)
    assert report["ttft_ms"] == 1.5
    assert (report["preemptions"], report["tokens_recomputed"]) == (0, 0)
    assert answer.usage is not None


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_the_real_client_finds_the_report_beside_the_usage_of_a_stream(client: openai.OpenAI, kind: str) -> None:
    options: dict[str, Any] = {"model": "echo", "stream": True, "max_tokens": 4}
    options["stream_options"] = {"include_usage": True}
    if kind == "chat":
        user = [{"role": "user", "content": "hi"}]
        chunks = list(client.chat.completions.create(messages=user, service_tier="priority", **options))
    else:
        chunks = list(client.completions.create(prompt="hi", extra_body={"service_tier": "priority"}, **options))
    assert all(chunk.model_dump()["service_tier"] == "priority" for chunk in chunks)
    assert [("headway" in (chunk.model_extra or {})) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1].model_extra or {})["headway"]["total_ms"] == 4.0


class Slow(HashExecutor):
    """A step takes as long as the cost model says."""

    def collect(self) -> StepResult:
        time.sleep(0.005)
        return super().collect()

    def close(self) -> None:
        pass


def real_engine(policy: Policy, *, rows: int = 1, num_blocks: int = 96, token_s: float | None = None) -> Engine:
    """One slot, steps of 5 ms: a second request waits. With `token_s` the cost model has that time per prompt token,
    and SLO admission rejects by it."""
    clock = MonotonicClock()
    metrics = EngineMetrics(clock)
    costs = CostModel(CostWeights(base=0.005, tokens=token_s or 0.0))
    limits = Limits(rows=rows, tokens=64)
    scheduler = Scheduler(KVLedger(num_blocks, 4), limits, policy, sink=metrics, costs=costs, observer=Backlog())
    info = EngineInfo("hash", 200, 257, 4, num_blocks, rows, ())
    slo_admission = None if token_s is None else SloAdmission(policy, costs)
    return Engine(scheduler, Slow(num_blocks, 4), info, metrics, clock, slo_admission=slo_admission)  # type: ignore[arg-type]


# A request without an objective is as urgent as the late ones (patience): it keeps its slot, and they are shed.


def test_a_request_that_expires_gets_429_and_is_counted() -> None:
    with serving(real_engine(SloAware(patience=0.03)), name="hash") as server:  # type: ignore[arg-type]
        running = post(server, {"prompt": [1, 2], "max_tokens": 60, "stream": True, "stop_token_ids": []})
        running.readline()
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, {"prompt": [3, 4], "slo": {"ttft_ms": 30}})
        assert caught.value.code == 429
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        error = json.load(caught.value)["error"]
        assert (error["code"], error["type"]) == ("deadline_unreachable", "rate_limit_error")
        assert "more time in slo" in error["message"]
        assert running.read().endswith(b"data: [DONE]\n\n")
        page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        assert 'headway_requests_total{finish="shed"} 1.0' in page
        server.wait_idle()


def test_a_request_that_would_be_late_is_rejected_at_once_with_a_time_to_retry() -> None:
    # By the forecast it waits 2.3 s for a slot and its prompt takes 4.7 s.
    with serving(real_engine(SloAware(), token_s=2.332), name="hash") as server:  # type: ignore[arg-type]
        running = post(server, {"prompt": [1, 2], "max_tokens": 60, "stream": True, "slo": {"ttft_ms": 5000}})
        running.readline()
        before = time.monotonic()
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, {"prompt": [3, 4], "slo": {"ttft_ms": 4000}})
        assert time.monotonic() - before < 2.0, "long before its time is over"
        assert caught.value.code == 429
        assert caught.value.headers["Retry-After"] == "4", "7 s predicted, 4 s allowed, and a step"
        error = json.load(caught.value)["error"]
        assert (error["code"], error["type"]) == ("deadline_unreachable", "rate_limit_error")
        assert error["message"].startswith("the first token would come after about 7 s, 3 s later than")
        assert running.read().endswith(b"data: [DONE]\n\n")
        page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        assert 'headway_requests_total{finish="shed"} 1.0' in page
        assert server.do(server.client.stats).finished == {"length": 1, "shed": 1}
        server.wait_idle()


def test_the_report_has_what_was_predicted_beside_what_was() -> None:
    with serving(real_engine(Policy(), token_s=0.001), name="hash") as server:  # type: ignore[arg-type]
        report = json.load(post(server, {"prompt": [1, 2, 3]}))["headway"]
        assert report["predicted_ttft_ms"] == pytest.approx(8.0), "one step, and three tokens of 1 ms"
        assert report["ttft_ms"] >= 5.0
    with serving(real_engine(Policy()), name="hash") as server:  # type: ignore[arg-type]
        assert json.load(post(server, {"prompt": [1, 2, 3]}))["headway"]["predicted_ttft_ms"] is None


def test_the_real_client_knows_a_shed_request_as_a_rate_limit() -> None:
    with serving(real_engine(SloAware(patience=0.03)), name="hash") as server:  # type: ignore[arg-type]
        running = post(server, {"prompt": [1, 2], "max_tokens": 60, "stream": True})
        running.readline()
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            client.completions.create(model="hash", prompt=[3, 4], extra_body={"slo": {"ttft_ms": 30}})
        assert caught.value.code == "deadline_unreachable"
        running.read()


def test_in_a_stream_that_has_begun_it_is_an_error_event() -> None:
    with serving(real_engine(SloAware()), name="hash") as server:  # type: ignore[arg-type]
        body = {"prompt": [[1, 2], [3, 4]], "max_tokens": 190, "stream": True, "slo": {"ttft_ms": 500}}
        response = post(server, body)
        assert response.status == 200
        events = [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "deadline_unreachable"
        assert "choices" in json.loads(events[0])
        server.wait_idle()


@pytest.mark.parametrize(("slo", "is_met"), [({"deadline_ms": 60_000}, True), ({"itl_ms": 0.1}, False), ({}, None)])
def test_the_parts_of_a_preempted_request_make_its_total(slo: dict[str, float], is_met: bool | None) -> None:
    # Two requests that grow to 20 blocks each where there are 24: one must give way, and its time shows.
    with serving(real_engine(Policy(), rows=2, num_blocks=24), name="hash") as server:  # type: ignore[arg-type]
        body = {"prompt": [list(range(1, 40)), list(range(50, 90))], "max_tokens": 38, "slo": slo}
        report = json.load(post(server, body))["headway"]
        assert report["preemptions"] >= 1
        assert report["tokens_recomputed"] > 0
        assert report["preempted_ms"] > 0
        assert sum(report[part] for part in PARTS) == pytest.approx(report["total_ms"], rel=0.01)
        assert report["slo_met"] is is_met
        page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        assert f"headway_tokens_recomputed_total {float(report['tokens_recomputed'])}" in page
        assert f"headway_preemptions_total {float(report['preemptions'])}" in page
