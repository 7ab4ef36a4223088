"""The pages for a browser: what runs at `/`, the API at `/docs`; nothing in them comes from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import pytest

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.serve.routes import Routes
from headway.text.defaults import SamplingDefaults
from serve_harness import Harness, serving


class Page(HTMLParser):
    """Checks that every element is closed, and keeps what it links to."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, text: str, has_script: bool = False) -> None:
        super().__init__()
        self._refused = ("img", "iframe", "link") if has_script else ("script", "img", "iframe")
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in self._refused
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def get(server: Harness, path: str, host: str = "", key: str = "") -> tuple[HTTPResponse, str]:
    headers = ({"host": host} if host else {}) | ({"authorization": f"Bearer {key}"} if key else {})
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def post(server: Harness, path: str, body: object) -> int:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_page_says_what_runs_and_links_lead_somewhere() -> None:
    with serving(name="<b>echo</b>", defaults=SamplingDefaults(temperature=0.2)) as server:
        response, text = get(server, "/")
        assert response.status == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "<b>" not in text
        assert "&lt;b&gt;echo&lt;/b&gt;" in text
        assert "512 tokens" in text
        assert "temperature 0.2" in text
        assert "ready" in text
        page = Page(text)
        assert {"/docs", "/metrics"} <= set(page.links)
        assert all(get(server, link)[0].status == 200 for link in page.links)
        (line,) = re.findall(r"<pre>(curl .*?)</pre>", text)
        assert shlex.split(unescape(line))[1] == f"{server.url}/v1/chat/completions"


def test_the_host_that_a_browser_names_is_taken_if_it_is_one() -> None:
    with serving(allowed_hosts="box.local") as server:
        assert "curl http://box.local:9/v1" in unescape(get(server, "/", "box.local:9")[1])
    with serving(allowed_hosts="*") as server:
        assert f"curl {server.url}/v1" in unescape(get(server, "/", "a;rm -rf")[1])


def test_docs_needs_nothing_from_elsewhere_and_may_run_its_own_script_alone() -> None:
    with serving() as server:
        response, text = get(server, "/docs")
    assert response.status == 200
    page = Page(text, has_script=True)
    assert page.links
    assert all(link.startswith("/") and not link.startswith("//") for link in page.links)
    assert not re.findall(r"""(?:https?:)?//\w|@import|url\(|\bimport\s*\(|\bsrc=""", text), "something is external"
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy, "the browser would refuse it"
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert {"default-src 'none'", "connect-src 'self'"} <= set(policy.split("; "))
    assert 'fetch("/openapi.json"' in text


OF_VECTORS = {"/v1/embeddings", "/v1/score", "/v1/rerank"}


def test_every_route_is_described_with_an_example_that_works() -> None:
    with serving() as server:
        told = json.loads(get(server, "/openapi.json")[1])
        _, text = get(server, "/docs")
        table = Routes(server.service).table()
        routes = {(each.path.replace(":path", ""), verb.lower()) for each in table for verb in each.methods or ()}
        described = {(path, verb) for path, verbs in told["paths"].items() for verb in verbs}
        assert described == {(path, verb) for path, verb in routes if verb != "head"}
        for path, verb in described:
            assert f"<li>{verb.upper()} {path}: " in text, "for browsers without scripts"
            operation = told["paths"][path][verb]
            assert operation["summary"]
            for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(operation)):
                assert reference in told["components"]["schemas"]
            if verb == "post":
                example = operation["requestBody"]["content"]["application/json"]["example"]
                # Those of vectors: tests/serve/test_embeddings.py, where a model makes some.
                assert post(server, path, example) == (404 if path in OF_VECTORS else 200)
    (parameter,) = told["paths"]["/v1/models/{id}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["example"]) == ("id", "path", "echo")
    chat = told["paths"]["/v1/chat/completions"]["post"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]


def test_with_a_key_the_page_asks_for_it_and_docs_asks_the_reader() -> None:
    with serving(api_key="hunter2") as server:
        assert get(server, "/")[0].status == 401
        assert get(server, "/openapi.json")[0].status == 401
        response, text = get(server, "/", key="hunter2")
        assert response.status == 200
        assert "hunter2" not in text
        assert "Bearer $HEADWAY_API_KEY" in unescape(text)
        response, text = get(server, "/docs")
        assert response.status == 200
        assert "hunter2" not in text
        assert '<input type="password" id="key"' in text


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key is ''; allowed: a key, or leave it out"):
        ServerConfig(api_key="")


def test_the_page_is_there_while_the_model_loads() -> None:
    with serving(is_open=False) as server:
        response, text = get(server, "/")
        assert (response.status, "loading" in text) == (200, True)
