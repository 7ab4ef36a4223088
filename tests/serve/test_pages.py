"""The pages for a browser: what runs at `/`, the API at `/docs`; nothing in them comes from elsewhere."""

from __future__ import annotations

import re
import shlex
from html import unescape
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import pytest

from headway.text.defaults import SamplingDefaults
from serve_harness import Harness, serving


class Page(HTMLParser):
    """Checks that every element is closed, and keeps what it links to."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe")
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
    with serving() as server:
        assert "curl http://box.local:9/v1" in unescape(get(server, "/", "box.local:9")[1])
        assert f"curl {server.url}/v1" in unescape(get(server, "/", "a;rm -rf")[1])


def test_docs_list_every_path_with_its_fields() -> None:
    with serving() as server:
        response, text = get(server, "/docs")
        assert response.status == 200
        page = Page(text)
        assert all(link.startswith("/") for link in page.links)
        for words in ("POST /v1/chat/completions", "GET /metrics", "repetition_penalty", "messages", "required"):
            assert words in text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_with_a_key_the_pages_ask_for_it_too_and_do_not_show_it(path: str) -> None:
    with serving(api_key="hunter2") as server:
        assert get(server, path)[0].status == 401
        response, text = get(server, path, key="hunter2")
        assert response.status == 200
        assert "hunter2" not in text
    assert path != "/" or "Bearer $HEADWAY_API_KEY" in unescape(text)


def test_the_page_is_there_while_the_model_loads() -> None:
    with serving(is_open=False) as server:
        response, text = get(server, "/")
        assert (response.status, "loading" in text) == (200, True)
