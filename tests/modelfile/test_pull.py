"""`headway models pull`, `rm`, `prune`: against a local server that speaks the hub's protocol, and a .gguf by URL."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.cli.main import main
from headway.cli.models import ago
from headway.errors import ConfigError
from headway.modelfile.cache import ModelCache
from headway.modelfile.pull import pull, pulled
from running import running

COMMIT = "1" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
    "README.md": b"not wanted",
}


class Hub(ThreadingHTTPServer):
    """Serves FILES as the repository owner/tiny, and any of them by its plain path; counts what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.told_sha256: dict[str, str] = {}  # what the hub says of a file, where that is not true
        self.fetched: list[tuple[str, str | None]] = []  # file and range of every GET
        self.most = 1 << 30  # bytes after which the connection ends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/models/owner/tiny/tree/"):
            tree = [
                {"type": "file", "path": each["rfilename"], "oid": each["blobId"], "size": each["size"]}
                | ({"lfs": each["lfs"] | {"oid": each["lfs"]["sha256"]}} if "lfs" in each else {})
                for each in self._info()["siblings"]
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, has_body)
            return
        if path.startswith("/api/models/owner/tiny"):
            self._send(200, json.dumps(self._info()).encode(), {"Content-Type": "application/json"}, has_body)
            return
        name = path.rpartition("/")[2]
        content = self.server.files.get(name)
        if content is None or path.startswith("/api"):
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, has_body)
            return
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{sha256}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, status, wanted = 0, 200, self.headers.get("Range")
        if wanted:
            begin, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if has_body:
            self.server.fetched.append((name, wanted))
        self._send(status, content[begin:], headers, has_body)

    def _info(self) -> dict[str, Any]:
        told = self.server.told_sha256
        siblings: list[dict[str, Any]] = []
        for name, content in self.server.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if name.endswith(".safetensors"):
                sha256 = told.get(name, hashlib.sha256(content).hexdigest())
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        return {"id": "owner/tiny", "modelId": "owner/tiny", "sha": COMMIT, "siblings": siblings, "private": False}

    def _send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body[: self.server.most])
            self.close_connection = self.close_connection or len(body) > self.server.most

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_a_model_of_a_hub_is_fetched_once_without_what_is_not_needed(hub: Hub, cache: ModelCache) -> None:
    path = pull("owner/tiny", cache, endpoint=hub.url)
    assert path == pulled("owner/tiny", cache)
    assert {each.name for each in path.iterdir() if each.is_file()} == set(FILES) - {"README.md"}
    assert all((path / name).read_bytes() == FILES[name] for name in FILES if name != "README.md")
    num_fetched = len(hub.fetched)
    pull("owner/tiny", cache, endpoint=hub.url)
    assert len(hub.fetched) == num_fetched


def test_a_file_that_is_not_what_the_hub_says_is_removed(hub: Hub, cache: ModelCache) -> None:
    hub.told_sha256["model.safetensors"] = "0" * 64
    with pytest.raises(ConfigError, match=r"model.safetensors of owner/tiny has the sha256 .*, not 000"):
        pull("owner/tiny", cache, endpoint=hub.url)
    assert not (cache.root / "hub/owner--tiny/model.safetensors").exists()


def test_what_a_hub_does_not_have_is_one_sentence(
    hub: Hub, cache: ModelCache, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["models", "pull", "owner/none", "--endpoint", hub.url, "--cache-dir", str(cache.root)]
    assert main(argv, {}) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"headway: cannot fetch owner/none from {hub.url}: ")
    assert len(err.strip().splitlines()) == 1
    for name in ("tiny", "a/b/c", "../x", "https://example.org/model.bin"):
        with pytest.raises(ConfigError, match=r"allowed: owner/name|not the URL of a \.gguf file"):
            pull(name, cache)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "no-address"])
def test_a_hub_that_is_not_in_reach_is_one_sentence(
    endpoint: str, cache: ModelCache, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["models", "pull", "owner/tiny", "--endpoint", endpoint, "--cache-dir", str(cache.root)]
    assert main(argv, {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway: cannot fetch owner/tiny from {endpoint}: ")
    assert line.endswith("--endpoint or HF_ENDPOINT names another hub, and the same command resumes it")


class _Broken(BaseHTTPRequestHandler):
    """Answers as no server of files does: by the path, half of a chunk, another protocol, or a page."""

    def do_GET(self) -> None:
        answers = {
            "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc",
            "other": b"SSH-2.0-x\r\n",
            "page": b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<!doctype html>",
            "none": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        }
        self.wfile.write(answers[self.path.split("/")[1]])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (":{port}/chunk/m.gguf", "the same command resumes it"),
        (":{port}/other/m.gguf", "SSH-2.0-x"),
        (":{port}/a b/m.gguf", "control characters"),
        (":abc/m.gguf", "nonnumeric port"),
        (":{port}/page/m.gguf", "starts with b'<!do', not b'GGUF'; a page of a hub names the file's own URL"),
        (":{port}/none/m.gguf", "404"),
    ],
)
def test_what_is_no_gguf_file_by_url_is_one_sentence(
    path: str, said: str, cache: ModelCache, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(ThreadingHTTPServer(("127.0.0.1", 0), _Broken)) as server:
        url = "http://127.0.0.1" + path.format(port=server.server_port)
        assert main(["models", "pull", url, "--cache-dir", str(cache.root)], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway: cannot fetch {url}: ")
    assert said in line
    assert ("resumes" in line) == ("chunk" in path), "only what was cut off is worth the same command"
    assert not (cache.root / "hub/m.gguf").exists()


def test_a_file_by_url_is_resumed_and_checked(hub: Hub, cache: ModelCache) -> None:
    content = b"GGUF" + FILES["model.safetensors"]
    hub.files["model.gguf"] = content
    url, hub.most = f"{hub.url}/files/model.gguf", 300_000
    with pytest.raises(ConfigError, match="the same command resumes it"):
        pull(url, cache)
    hub.most = 1 << 30
    seen: list[tuple[int, int]] = []
    sha256 = hashlib.sha256(content).hexdigest()
    path = pull(url, cache, sha256=sha256, progress=lambda here, total: seen.append((here, total)))
    assert path.read_bytes() == content
    assert hub.fetched[-1] == ("model.gguf", "bytes=300000-")
    assert seen[-1] == (len(content), len(content))
    assert pull(url, cache, sha256=sha256) == path
    assert len(hub.fetched) == 2
    with pytest.raises(ConfigError, match="damaged on its way and is removed"):
        pull(url, cache, sha256="0" * 64)
    assert not path.exists()


def test_rm_and_prune_remove_what_they_say(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, root = ModelCache(tmp_path), str(tmp_path)

    def run(*argv: str) -> str:
        assert main(["models", *argv, "--cache-dir", root], {}) == 0
        return capsys.readouterr().out

    assert "headway serve owner/tiny" in run("pull", "owner/tiny", "--endpoint", hub.url)
    for number in range(3):
        path = cache.publish(f"{number}{'a' * 63}/weights", lambda draft: draft.write_bytes(bytes(1000)) and None)
        os.utime(path, (1e9 + number, 1e9 + number))
    assert "owner/tiny" in run()
    assert re.fullmatch(r"removed owner/tiny \(.* that were pulled\)\n", run("rm", "owner/tiny"))
    assert pulled("owner/tiny", cache) is None
    assert run("prune", "--keep-gb", "0.0000021").endswith("conversions take 2.9 KiB, all in use\n"), "by this process"
    del cache
    assert run("prune", "--keep-gb", "0.0000021").splitlines() == [
        "removed a conversion of 0aaaaaaaaaaa (1000 B)",
        "conversions take 2.0 KiB",
    ]
    assert main(["models", "rm", "nothing-such", "--cache-dir", root], {}) == 2
    assert "there is 1aaaaaaaaaaa, 2aaaaaaaaaaa" in capsys.readouterr().err
    assert run("rm", "1aaaaaaaaaaa") == "removed 1aaaaaaaaaaa (1000 B of conversions)\n"


def test_the_list_has_a_line_per_model_with_sizes_and_when_it_was_used(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--cache-dir", str(tmp_path)]
    assert main(["models", "pull", "owner/tiny", "--endpoint", hub.url, *given], {}) == 0
    cache, digest = ModelCache(tmp_path), "a" * 64
    cache.note_name(digest, "owner/tiny")
    made = cache.publish(f"{digest}/weights", lambda draft: draft.write_bytes(bytes(2048)) and None)
    hours_ago = time.time() - 3 * 3600 - 60
    os.utime(made, (hours_ago, hours_ago))
    capsys.readouterr()
    assert main(["models", *given, "--cache-limit-gb", "5"], {}) == 0
    header, bundled, tiny, _, total = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "NAME"
    assert re.fullmatch(r"smollm2-135m-instruct +installed +93\.8 MiB", bundled)
    assert re.fullmatch(r"owner/tiny +pulled +\S+ \S+ +2\.0 KiB +3 hours ago", tiny)
    assert total == f"Conversions take 0.00 of at most 5 GB in {tmp_path}"
    assert main(["models", *given, "--paths"], {}) == 0
    assert str(tmp_path / "hub" / "owner--tiny") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "just now"), (59, "just now"), (61, "1 minute ago"), (7200, "2 hours ago"), (90_000, "1 day ago")],
)
def test_when_it_was_is_said_in_words(seconds: float, said: str) -> None:
    assert ago(1000.0, 1000.0 + seconds) == said
