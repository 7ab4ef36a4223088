"""Unknown fields are ignored, and each name is logged once."""

from __future__ import annotations

import json
import logging

import pytest

from headway.errors import RequestError
from headway.serve.body import BodyDecoder
from headway.serve.openai import CompletionRequest


def body(**fields: object) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def test_unknown_names_are_logged_once_and_at_most_a_hundred(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert decoder.decode(body(flavour="mint", user="me", store=True), CompletionRequest).request.prompt == "x"
        assert [record.getMessage() for record in caplog.records] == ["unknown field 'flavour' is ignored"]
        for index in range(300):
            decoder.decode(body(**{f"made_up_{index}": 1, "y" * 500: 2}), CompletionRequest)
    assert len(caplog.records) == 100
    assert max(len(record.getMessage()) for record in caplog.records) < 120


def test_line_breaks_in_a_name_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        BodyDecoder().decode(body(**{"a\nERROR forged": 1}), CompletionRequest)
    assert "\n" not in caplog.records[0].getMessage()


def test_refused_field_wins_over_a_fault_elsewhere() -> None:
    with pytest.raises(RequestError, match="use_beam_search"):
        BodyDecoder().decode(body(use_beam_search=True, n="three"), CompletionRequest)
