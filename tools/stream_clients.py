"""Many streamed completions at once by one process that does little else: raw sockets, one `epoll`, no parser.

    tools/stream_clients.py URL --streams 3000 --tokens 150 --pid PID      prints one JSON object

It counts complete streams, takes the time between two arrivals of each stream, and reads the processor time of the
given processes (/proc) while all streams run: after the last one has begun and before the first one ends. A server that
is late writes several tokens as one event; every token is one byte of text, so that bytes count them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

RAMP_PER_S = 200  # streams begun a second, so that requests do not hold up streams
_RECV_BYTES = 4096  # a buffer of this size is made for every read


@dataclass(slots=True)
class OneStream:
    """One connection; `at` is the time of its last event, 0 before the first."""

    sock: socket.socket
    at: float = 0.0
    num_events: int = 0
    tail: bytes = b""


@dataclass(slots=True)
class Load:
    """A load and what came of it."""

    host: str
    port: int
    request: bytes
    num_streams: int
    pids: list[int]
    num_complete: int = 0
    num_events: int = 0  # while all streams ran
    num_bytes: int = 0  # likewise
    sizes: Counter[int] = field(default_factory=Counter)  # of what came with one event: most have one token
    cpu_s: float = 0.0
    window_s: float = 0.0

    def run(self, timeout_s: float) -> dict[str, float]:
        poll, streams = select.epoll(), dict[int, OneStream]()
        begun, num_sent, num_waiting, num_open = time.monotonic(), 0, self.num_streams, 0
        gaps, firsts, cpu_at, cpu_whole = array("d"), array("d"), -1.0, self.cpu()
        sent_at: dict[int, float] = {}
        while (num_sent < self.num_streams or num_open) and time.monotonic() - begun < timeout_s:
            while num_sent < min(self.num_streams, 1 + int((time.monotonic() - begun) * RAMP_PER_S)):
                sock = socket.create_connection((self.host, self.port))
                sock.sendall(self.request)
                sock.setblocking(False)
                poll.register(sock, select.EPOLLIN)
                streams[sock.fileno()], sent_at[sock.fileno()] = OneStream(sock), time.monotonic()
                num_sent, num_open = num_sent + 1, num_open + 1
            for fd, _ in poll.poll(0.002 if num_sent < self.num_streams else 0.1):
                stream = streams[fd]
                try:
                    data = stream.sock.recv(_RECV_BYTES)
                except OSError:
                    data = b""
                now, num_events = time.monotonic(), data.count(b"data: ")
                if num_events:
                    if not stream.at:
                        num_waiting -= 1
                        firsts.append(now - sent_at[fd])
                        if not num_waiting:
                            cpu_at, window_at = self.cpu(), now
                    elif cpu_at >= 0 and not self.cpu_s:
                        gaps.append(now - stream.at)
                        self._count(num_events, len(data))
                    stream.at = now
                    stream.num_events += num_events
                if data and not data.endswith(b"0\r\n\r\n") and len(data) > 40:
                    stream.tail = data[-40:]
                    continue
                stream.tail = (stream.tail + data)[-60:]
                if not data or stream.tail.endswith(b"0\r\n\r\n"):
                    if cpu_at >= 0 and not self.cpu_s:
                        self.cpu_s, self.window_s = self.cpu() - cpu_at, now - window_at
                    self.num_complete += b"data: [DONE]\n\n" in stream.tail
                    poll.unregister(fd)
                    stream.sock.close()
                    num_open -= 1
        return self._report(gaps, firsts, self.cpu() - cpu_whole)

    def _count(self, num_events: int, num_bytes: int) -> None:
        self.num_events += num_events
        self.num_bytes += num_bytes
        self.sizes[num_bytes] += num_events == 1

    def cpu(self) -> float:
        """Seconds of processor time, user and system, of the processes so far."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _report(self, gaps: array[float], firsts: array[float], cpu_whole_s: float) -> dict[str, float]:
        gaps, firsts = array("d", sorted(gaps)), array("d", sorted(firsts))
        ((event_bytes, _),) = self.sizes.most_common(1) or [(0, 0)]
        num_tokens = self.num_events + max(0, self.num_bytes - self.num_events * event_bytes)
        return {
            "streams": self.num_streams,
            "complete": self.num_complete,
            "window_s": round(self.window_s, 2),
            "tokens": num_tokens,
            "events": self.num_events,
            "gap_p50_ms": round(1e3 * _at(gaps, 0.5), 1),
            "gap_p99_ms": round(1e3 * _at(gaps, 0.99), 1),
            "gap_max_ms": round(1e3 * _at(gaps, 1.0), 1),
            "first_p50_ms": round(1e3 * _at(firsts, 0.5), 1),
            "cpu_us_per_token": round(1e6 * self.cpu_s / max(1, num_tokens), 2),
            "cpu_s": round(cpu_whole_s, 2),
        }


def _at(values: array[float], quantile: float) -> float:
    return values[min(len(values) - 1, int(quantile * len(values)))] if values else float("nan")


def request_bytes(host: str, port: int, body: dict[str, object], path: str = "/v1/completions") -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def head_times(host: str, port: int, request: bytes, count: int) -> list[float]:
    """Seconds from a request to the head of its answer, one request at a time on one connection."""
    seconds: list[float] = []
    with socket.create_connection((host, port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            begun = time.perf_counter()
            sock.sendall(request)
            data = sock.recv(_RECV_BYTES)
            seconds.append(time.perf_counter() - begun)
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"unexpected answer: {data[:300]!r}")
            while not data.endswith(b"0\r\n\r\n"):
                data = data[-16:] + sock.recv(_RECV_BYTES)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=150, help="output tokens of each stream")
    parser.add_argument("--pid", type=int, action="append", default=[], help="whose processor time is taken")
    parser.add_argument("--model", default="model", help="the name that requests carry")
    parser.add_argument("--heads", type=int, default=0, help="only time so many heads, one request at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which it stops waiting")
    parser.add_argument("--chat", action="store_true", help="chat completions")
    args = parser.parse_args()
    url = urlsplit(args.url)
    host, port = url.hostname or "", url.port or 80
    body: dict[str, object] = {"model": args.model, "max_tokens": args.tokens, "stream": True, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "abcdef"}]} if args.chat else {"prompt": "zqxj"}
    request = request_bytes(host, port, body, "/v1/chat/completions" if args.chat else "/v1/completions")
    if args.heads:
        times = array("d", sorted(head_times(host, port, request, args.heads)))
        print(
            json.dumps(
                {"head_p50_ms": round(1e3 * _at(times, 0.5), 3), "head_p99_ms": round(1e3 * _at(times, 0.99), 3)}
            )
        )
    else:
        print(json.dumps(Load(host, port, request, args.streams, args.pid).run(args.timeout)))


if __name__ == "__main__":
    main()
