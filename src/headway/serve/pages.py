"""Two pages for a browser: what runs at `/`, and at `/docs` the API with a form for every path. Nothing from elsewhere.

They know no more than the other endpoints tell. `/docs` is `docs.html`, the same for every server; it reads
`/openapi.json` with the key that is entered there.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse

from headway.serve.openapi import ENDPOINTS
from headway.serve.run import curl
from headway.serve.service import Service

_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", "cache-control": "no-store"}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}pre{background:#f3f3f3;padding:.8rem;overflow-x:auto}"
    "td,th{text-align:left;padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}a{color:#0645ad}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
    "pre{background:#262626}a{color:#8ab4f8}}"
)


def home(request: Request, service: Service, version: str) -> HTMLResponse:
    """What runs here, and the line that asks it."""
    facts = {"state": service.phase.value, "version": version}
    name, model = "MODEL", service.model_or_none
    if model is not None:
        name, info = model.name, model.client.info
        told = ", ".join(f"{key} {value:g}" for key, value in model.defaults.fill({}).items())
        facts |= {"model": name, "context": f"{info.max_model_len} tokens", "requests at once": str(info.max_num_seqs)}
        facts |= {"weights and KV": f"{info.dtype or 'unknown'}, {info.kv_dtype or 'unknown'}"}
        facts |= {"where a request does not say": told}
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts.items())
    line = escape(curl(_url(request), name, has_key=service.config.asks_for_key))
    links = ["/docs", "/metrics", "/v1/models", "/openapi.json"] if model is not None else ["/docs"]
    linked = " · ".join(f'<a href="{link}">{link}</a>' for link in links)
    return _page("headway", f"<table>{rows}</table><p>Ask it:</p><pre>{line}</pre><p>{linked}</p>")


class DocsPage:
    """`docs.html`, which may run its own script and ask its own server, and nothing else."""

    def __init__(self) -> None:
        text = (resources.files("headway.serve") / "docs.html").read_text("utf-8")
        script, style = (_hash(text, tag) for tag in ("script", "style"))
        policy = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; form-action 'none'"
        self._headers = {**_HEADERS, "content-security-policy": f"{policy}; base-uri 'none'; frame-ancestors 'none'"}
        told = (f"{each.verb.upper()} {each.path}: {each.summary}" for each in ENDPOINTS)
        paths = "".join(f"<li>{escape(line)}</li>" for line in told)
        self._text = text.replace("<!--paths-->", f"<ul>{paths}</ul>")

    def response(self) -> HTMLResponse:
        return HTMLResponse(self._text, headers=self._headers)


def _hash(text: str, tag: str) -> str:
    """What a content security policy calls the one inline element of this kind."""
    content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


def _url(request: Request) -> str:
    """Where the browser found this server."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):  # it goes into a command line
        address, port = request.scope["server"]
        host = f"{address}:{port}"
    return f"{request.scope['scheme']}://{host}"


def _page(title: str, body: str) -> HTMLResponse:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>',
        headers=_HEADERS,
    )
