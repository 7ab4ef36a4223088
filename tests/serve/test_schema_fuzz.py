"""Requests made from the OpenAPI document, valid and invalid ones, to every route over real HTTP.

200 for each route, half of them valid; `--schema-cases 2000` sends more. A body that the document does not allow is a
4xx with an error object, whatever else is wrong with it; nothing is a 5xx but a 503 with Retry-After.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from headway.serve.openapi import ENDPOINTS, document
from raw_http import call
from serve_harness import Harness, serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")
    import jsonschema_rs

DOCUMENT: dict[str, Any] = json.loads(document("0", "echo"))


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving() as harness:
        yield harness
        harness.wait_idle()


def require_sound(status: int, headers: Any, content: bytes) -> None:
    assert status < 500 or (status == 503 and headers["retry-after"]), content[:500]
    if status >= 400:
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["message"], str)


CASES = [(endpoint, mode) for endpoint in ENDPOINTS for mode in schemathesis.GenerationMode if endpoint.asked]
CASES += [(endpoint, schemathesis.GenerationMode.POSITIVE) for endpoint in ENDPOINTS if not endpoint.asked]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("endpoint", "mode"), CASES, ids=lambda value: getattr(value, "path", None) or value.value)
def test_every_answer_is_sound(server: Harness, request: pytest.FixtureRequest, endpoint: Any, mode: Any) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[endpoint.path][endpoint.verb.upper()]
    allowed = None
    if endpoint.asked is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.asked.__name__}", "components": DOCUMENT["components"]}
        allowed = jsonschema_rs.validator_for(schema)
    num_cases = max(1, request.config.getoption("--schema-cases") // 2)
    if endpoint.asked is None and "{" not in endpoint.path:
        num_cases = min(num_cases, 5)  # there is nothing to vary
    statuses: Counter[int] = Counter()
    num_invalid = 0

    @settings(max_examples=num_cases, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal num_invalid
        response = case.call(base_url=server.url)
        statuses[response.status_code] += 1
        require_sound(response.status_code, response.headers, response.content)
        if allowed is not None and not (isinstance(case.body, dict) and allowed.is_valid(case.body)):
            num_invalid += 1
            assert response.status_code in range(400, 500), case.body

    ask()
    print(endpoint.path, mode.value, dict(statuses), f"{num_invalid} invalid")
    if allowed is not None and mode is schemathesis.GenerationMode.NEGATIVE:
        assert num_invalid > num_cases // 4


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.verb} {endpoint.path}")
def test_other_methods_are_405(server: Harness, endpoint: Any) -> None:
    path = endpoint.path.replace("{id}", "x")
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - {endpoint.verb.upper()}:
        status, told, _ = call(server.url, method, path)
        assert (status, told["error"]["code"]) == (405, "bad_method")
