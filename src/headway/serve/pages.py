"""Two pages for a browser: what runs, and the API with its fields. No script, no picture, nothing from elsewhere.

They ask for the server's key like every other path. They know no more than the other endpoints tell.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse

from headway.serve.openapi import document
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
    line = escape(curl(_url(request), name, has_key=service.config.api_key is not None))
    links = ["/docs", "/metrics", "/v1/models", "/openapi.json"] if model is not None else ["/docs"]
    linked = " · ".join(f'<a href="{link}">{link}</a>' for link in links)
    return _page("headway", f"<table>{rows}</table><p>Ask it:</p><pre>{line}</pre><p>{linked}</p>")


def docs(version: str) -> HTMLResponse:
    """Every path, and the fields of what it takes."""
    told: dict[str, Any] = msgspec.json.decode(document(version))
    parts = []
    for path, verbs in told["paths"].items():
        for verb, operation in verbs.items():
            parts.append(f"<h2>{escape(f'{verb.upper()} {path}')}</h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                reference = body["content"]["application/json"]["schema"]["$ref"]
                parts.append(_fields(told["components"]["schemas"][reference.rpartition("/")[2]]))
    parts.append('<p><a href="/openapi.json">/openapi.json</a> has all of it for programs · <a href="/">home</a></p>')
    return _page("headway: the API", "".join(parts))


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (name, _kind(field), "required" if name in required else "")
        for name, field in schema.get("properties", {}).items()
    ]
    columns = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in columns)}</table>"


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(kind for kind in map(_kind, field["anyOf"]) if kind != "null")
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


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
