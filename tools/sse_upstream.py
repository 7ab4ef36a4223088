"""A server of the OpenAI interface that computes nothing: one event a tick for every stream, for routers to pass on.

    tools/sse_upstream.py [--tick-ms 100]      prints its port; TICK 0: all events at once

Its events have the size and shape of headway's. It answers whatever else a router asks: /health, /v1/models, and so on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time

import uvloop

MODEL = "model"
_KIND = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\n" + _KIND + b"transfer-encoding: chunked\r\n\r\n"
_OTHER = {
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "owned_by": "none", "max_model_len": 16384}],
    },
    "/get_model_info": {"model_path": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "is_generation": True},
    "/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "max_running_requests": 8192},
    "/server_info": {"model_path": MODEL, "served_model_name": MODEL, "max_running_requests": 8192},
    "/version": {"version": "0.1"},
}


def _chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    said = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "created": 1700000000,
        "model": MODEL,
        "choices": [choice],
        "system_fingerprint": "headway-0.1.0",
        "object": "text_completion",
    }
    data = b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN, _LAST = _chunk("a"), _chunk("a", "length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Ticker:
    """Writes one event to each open stream at every multiple of the tick."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self._left: dict[asyncio.Transport, int] = {}
        self._loop = asyncio.get_running_loop()
        if tick_s:
            self._next()

    def add(self, transport: asyncio.Transport, num_tokens: int) -> None:
        if self.tick_s:
            self._left[transport] = num_tokens
        else:
            transport.write(_HEAD + _TOKEN * (num_tokens - 1) + _LAST)

    def drop(self, transport: asyncio.Transport) -> None:
        self._left.pop(transport, None)

    def _next(self) -> None:
        self._loop.call_later(self.tick_s - time.monotonic() % self.tick_s, self._tick)

    def _tick(self) -> None:
        left = self._left
        for transport, num_tokens in list(left.items()):
            if num_tokens > 0:
                left[transport] = -num_tokens + 1
                transport.write(_HEAD + _TOKEN)  # the head comes with the first token, as headway's does
            else:
                left[transport] = num_tokens + 1
                transport.write(_TOKEN if num_tokens < -1 else _LAST)
            if left[transport] == 0:
                del left[transport]
        self._next()


class Upstream(asyncio.Protocol):
    """One connection: whole requests in, answers out."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._ticker.drop(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            body, self._data = rest[:length], rest[length:]
            self._answer(head.split(b" ", 2)[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        if path.endswith("completions"):
            self._ticker.add(self._transport, json.loads(body)["max_tokens"])
            return
        data = json.dumps(_OTHER.get(path.partition("?")[0], {"status": "ok"})).encode()
        kind = b"content-type: application/json\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (kind, len(data), data))


async def _serve(tick_s: float) -> None:
    ticker, loop = Ticker(tick_s), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(ticker), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tick-ms", type=float, default=100.0, help="between two tokens of a stream; 0: none")
    uvloop.run(_serve(parser.parse_args().tick_ms / 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
