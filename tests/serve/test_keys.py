"""The file of keys: tenants by key, errors that show no key, limits that hold, and a reload that drops nothing."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from echo_engine import EchoEngine
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.errors import ConfigError, EngineRestarting
from headway.serve import reload
from headway.serve.keys import Tenant, read_keys, weighted
from headway.serve.problem import Problem
from headway.serve.ratelimit import RateBucket, TenantLimits, _duration
from headway.serve.reload import Reload
from headway.serve.tenants import TENANT, Tenants
from serve_harness import serving
from tenant_kit import ANN, BOB, ask, get, keys_file


def test_every_key_is_its_tenants_and_no_other_opens(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-second").hexdigest()
    text = f'[tenants.ann]\nkeys = ["{ANN}", "sha256:{digest}"]\nweight = 2.5\n[tenants.bob]\nkeys = ["{BOB}"]\n'
    text += f'[tenants.cid]\nkeys = ["sha256:{hashlib.sha256(b"sk-third").hexdigest().upper()}"]\n'
    keyring = read_keys(str(keys_file(tmp_path, text)))
    assert keyring.find(ANN.encode()) == keyring.find(b"sk-second") == Tenant("ann", 2.5)
    assert keyring.find(BOB.encode()) == Tenant("bob")
    assert keyring.find(b"sk-third") == Tenant("cid")
    for wrong in (b"", ANN[:-1].encode(), ANN.encode() + b"x", digest.encode(), b"x" * 1_000_000, b"\xff"):
        assert keyring.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = 1", "needs a table"),
        ("[tenants]", "needs a table"),
        ('[tenants."a b"]\nkeys=["k"]', "letters, digits"),
        ("[tenants.a]\nweight = 1", "a list of at least one"),
        ("[tenants.a]\nkeys = []", "a list of at least one"),
        ('[tenants.a]\nkeys = ["SECRET KEY"]', "printable ASCII"),
        (f'[tenants.a]\nkeys = ["sha256:{"a" * 63}"]', "sha256: and 64 hex digits"),
        (f'[tenants.a]\nkeys = ["SHA256:{"a" * 64}"]', "sha256: and 64 hex digits"),
        ('[tenants.a]\nkeys = ["SECRET"]\nrpm = 3', "allowed: keys, weight, requests_per_minute"),
        ('[tenants.a]\nkeys = ["SECRET"]\nconcurrency = 0', "concurrency of a is 0"),
        ('[tenants.a]\nkeys = ["SECRET"]\nweight = true', "weight of a is True"),
        ('[tenants.a]\nkeys = ["SECRET"]\n[tenants.b]\nkeys = ["SECRET"]', "a and b have the same key"),
        ('[tenants.a]\nkeys = ["SECRET', "not TOML"),
    ],
)
def test_a_bad_file_is_named_and_its_keys_are_not(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        read_keys(str(keys_file(tmp_path, text)))
    assert "SECRET" not in str(caught.value)


def test_a_file_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the keys file /nowhere: No such file"):
        read_keys("/nowhere")


def test_keys_and_api_key_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="none beside api_key"):
        ServerConfig(api_key="a", keys="b")


def test_weights_of_the_file_are_the_shares_of_the_scheduler(tmp_path: Path) -> None:
    keyring = read_keys(str(keys_file(tmp_path, f'[tenants.ann]\nkeys = ["{ANN}"]\nweight = 3\n')))
    config = EngineConfig.of(fair=True, tenant_weights="ann=1,cem=2")
    assert weighted(config, keyring).scheduler.tenant_weights == "ann=3,cem=2"
    with pytest.raises(ConfigError, match="add --fair"):
        weighted(EngineConfig(), keyring)


def test_the_key_says_whose_request_it_is_and_user_does_not(tmp_path: Path) -> None:
    engine = EchoEngine()
    with serving(engine, keys=str(keys_file(tmp_path)), home=tmp_path) as server:
        assert ask(server, ANN, user="bob")[0] == ask(server, BOB)[0] == 200
        assert [submit.tenant for submit in engine.submits] == ["ann", "bob"]
        for key in ("", "any", ANN[:-1]):
            status, headers, body = ask(server, key)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert not any(name.startswith("x-ratelimit") for name in headers)
        assert get(server, "/metrics") == 401
        assert get(server, "/health") == 200


def clock() -> tuple[Callable[[], float], Callable[[float], None]]:
    time = [100.0]
    return lambda: time[0], lambda seconds: time.__setitem__(0, time[0] + seconds)


def test_a_bucket_refills_steadily_and_remembers_debt() -> None:
    bucket = RateBucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait(1, 1.0) == 0.0
    bucket.take(31, 1.0)  # an answer that got longer than was charged
    assert bucket.wait(1, 1.0) == pytest.approx(31.0)
    assert bucket.wait(1000, 1.0) == pytest.approx(90.0)  # more than fits waits for a full one
    bucket.resize(120, 31.0)
    assert bucket.level(31.0) == pytest.approx(0.0)
    assert RateBucket(60, 5.0).level(4.0) == 60  # a clock that goes back gives nothing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.12, "120ms"), (1.5, "1.5s"), (59.99, "60s"), (119.5, "2m0s"), (360.0, "6m0s")],
)
def test_durations_are_written_as_clients_know_them(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


@pytest.mark.parametrize(("field", "limit"), [("requests_per_minute", 3), ("concurrency", 3)])
def test_one_request_more_than_the_limit_is_refused(field: str, limit: int) -> None:
    limits = TenantLimits(Tenant("ann", **{field: limit}), 0.0)  # type: ignore[arg-type]
    for _ in range(limit):
        limits.enter(0.0)
    with pytest.raises(Problem) as caught:
        limits.enter(0.0)
    assert (caught.value.status, caught.value.type, caught.value.code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    wait = int(caught.value.headers["retry-after"])
    assert wait == (20 if field == "requests_per_minute" else 1)
    limits.num_open -= 1
    limits.enter(float(wait))  # and what it said was true


def test_limits_hold_over_http_and_headers_count_down(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\nrequests_per_minute = 2\ntokens_per_minute = 600\n'
    with serving(EchoEngine(), keys=str(keys_file(tmp_path, text)), home=tmp_path) as server:
        now, sleep = clock()
        server.service.tenants._clock = now
        status, headers, _ = ask(server, ANN, max_tokens=297)
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-reset-requests"] == "30s"
        assert headers["x-ratelimit-remaining-tokens"] == "300"
        assert ask(server, ANN, max_tokens=3)[1]["x-ratelimit-remaining-tokens"] == "294"
        status, headers, body = ask(server, ANN)
        assert (status, headers["retry-after"], body["error"]["type"]) == (429, "30", "rate_limit_error")
        sleep(30)
        status, headers, body = ask(server, ANN, max_tokens=500, n=2)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        sleep(int(headers["retry-after"]) + 30)
        assert ask(server, ANN, max_tokens=500, n=2)[0] == 200


def test_a_tenant_that_sends_too_much_is_limited_and_the_other_is_not(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\nrequests_per_minute = 10\n[tenants.bob]\nkeys = ["{BOB}"]\n'
    with serving(keys=str(keys_file(tmp_path, text)), home=tmp_path) as server, ThreadPoolExecutor(8) as pool:
        server.service.tenants._clock = lambda: 0.0
        replies = list(pool.map(lambda i: (i % 5 == 0, *ask(server, BOB if i % 5 == 0 else ANN)), range(100)))
    others = [status for is_bob, status, _, _ in replies if is_bob]
    assert others == [200] * 20
    limited = [(status, headers) for is_bob, status, headers, _ in replies if not is_bob]
    assert [status for status, _ in limited].count(200) == 10
    assert all(headers["retry-after"] == "6" for status, headers in limited if status == 429)


def test_what_an_answer_did_not_use_is_given_back(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\ntokens_per_minute = 600\n'
    with serving(EchoEngine(eos_after=2), keys=str(keys_file(tmp_path, text)), home=tmp_path) as server:
        server.service.tenants._clock = lambda: 0.0
        for num_left in (594, 588):
            assert ask(server, ANN, max_tokens=400)[0] == 200
            limits = server.service.tenants._limits["ann"]
            assert limits.tokens is not None
            assert limits.tokens.level(0.0) == num_left  # three of the prompt, two letters and the end
        assert limits.num_open == 0


def test_a_prompt_that_is_only_scored_costs_its_tokens(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\ntokens_per_minute = 600\n'
    with serving(EchoEngine(), keys=str(keys_file(tmp_path, text)), home=tmp_path) as server:
        server.service.tenants._clock = lambda: 0.0
        assert ask(server, ANN, prompt="a" * 100, echo=True, logprobs=1, max_tokens=0)[0] == 200
        limits = server.service.tenants._limits["ann"]
        assert limits.tokens is not None
        assert limits.tokens.level(0.0) == 500


def test_an_echo_before_an_answer_costs_the_prompt_twice_as_it_is_computed_twice(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\ntokens_per_minute = 600\n'
    with serving(EchoEngine(eos_after=2), keys=str(keys_file(tmp_path, text)), home=tmp_path) as server:
        server.service.tenants._clock = lambda: 0.0
        limits = server.service.tenants._limits
        for logprobs, num_left in ((None, 497), (1, 294)):  # 100 of the prompt, two letters and the end
            asked = {"prompt": "a" * 100, "echo": True, "logprobs": logprobs}
            assert ask(server, ANN, max_tokens=100, **asked)[0] == 200
            tokens = limits["ann"].tokens
            assert tokens is not None
            assert tokens.level(0.0) == num_left
        status, _, told = ask(server, ANN, max_tokens=100, **asked)
        assert status == 429, "both parts together are more than what is left, and nothing is scored"
        assert "may come to 300" in told["error"]["message"]
        assert tokens.level(0.0) == 294


def test_the_official_client_sees_a_rate_limit_error(tmp_path: Path) -> None:
    text = f'[tenants.ann]\nkeys = ["{ANN}"]\nrequests_per_minute = 1\n'
    with (
        serving(keys=str(keys_file(tmp_path, text)), home=tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=ANN, max_retries=0) as client,
    ):
        client.completions.create(model="echo", prompt="abc", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="echo", prompt="abc", max_tokens=1)
    assert caught.value.response.headers["retry-after"] == "60"


def test_reload_changes_keys_and_limits_and_drops_nothing(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f'[tenants.ann]\nkeys = ["{ANN}"]\nconcurrency = 1\n')
    with serving(EchoEngine(hold_after=1), keys=str(file), home=tmp_path) as server:
        reading = Reload(ServeConfig(server=server.config), None, server.client, server.service.tenants)
        got: list[tuple[int, dict[str, str], dict[str, Any]]] = []
        thread = threading.Thread(target=lambda: got.append(ask(server, ANN, max_tokens=400)))
        thread.start()
        while not server.do(server.client.stats).running:
            pass
        assert ask(server, ANN)[0] == 429
        file.write_text(f'[tenants.ann]\nkeys = ["sk-new"]\nconcurrency = 2\n[tenants.bob]\nkeys = ["{BOB}"]\n')
        server.do(reading.run)
        assert ask(server, ANN)[0] == 401
        assert ask(server, BOB, max_tokens=1)[0] == 200
        assert ask(server, "sk-new", max_tokens=1)[0] == 200
        file.write_text("[tenants.ann]\nkeys = 7\n")
        server.do(reading.run)  # a bad file changes nothing
        assert ask(server, "sk-new", max_tokens=1)[0] == 200
        assert server.do(server.client.stats).running == 1
        server.engine._hold_after = None
        thread.join(20)
        assert got[0][0] == 200


class AwayClient:
    """An engine that is being replaced the first times it is asked."""

    def __init__(self, num_away: int) -> None:
        self.num_away = num_away
        self.settings: dict[str, Any] = {}

    async def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        if self.num_away:
            self.num_away -= 1
            raise EngineRestarting("the engine process is being replaced")
        self.settings |= changes
        return self.settings


def test_weights_that_change_while_the_engine_is_replaced_reach_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "AGAIN_S", 0.0, raising=False)
    file = keys_file(tmp_path, f'[tenants.ann]\nkeys = ["{ANN}"]\nweight = 2\n')
    config = ServeConfig(EngineConfig.of(fair=True), ServerConfig(keys=str(file)))
    tenants, client = Tenants.open(config.server, tmp_path), AwayClient(3)
    file.write_text(f'[tenants.ann]\nkeys = ["{ANN}"]\nweight = 5\n')
    asyncio.run(Reload(config, None, client, tenants).run())  # type: ignore[arg-type]
    assert client.settings == {"tenant_weights": "ann=5"}
    assert "as they were" not in caplog.text


def test_a_request_that_came_before_a_reload_has_the_limits_of_after(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f'[tenants.ann]\nkeys = ["{ANN}"]\nconcurrency = 1\n')
    tenants = Tenants.open(ServerConfig(keys=str(file)), tmp_path)
    scope = {TENANT: tenants.identify({b"authorization": f"Bearer {ANN}".encode()})}
    file.write_text(f'[tenants.ann]\nkeys = ["{ANN}"]\nconcurrency = 2\n')
    tenants.reload()
    with tenants.visit(scope), tenants.visit(scope), pytest.raises(Problem), tenants.visit(scope):
        pass
