"""A server of its own per file, and the client that people have."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from serve_harness import Harness, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving() as harness:
        yield harness


@pytest.fixture
def client(server: Harness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
