"""What the bytes of a streamed answer say: TTFT, ITL, E2E, tokens; percentiles of many, and goodput.

It reads bytes that were kept with their arrival times, after a run, so that reading them costs the run nothing. Knows
the events of OpenAI's chat and text completions and nothing that only headway sends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from headway.bench.console import print_table
from headway.errors import ConfigError

SHARES = (50, 90, 99)
Piece = tuple[float, bytes]
"""When it arrived, and what."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request has to keep to count for goodput: TTFT, and its mean ITL."""

    ttft_ms: float = 1000.0
    itl_ms: float = 100.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"slo_{name} is {value:g}; allowed: milliseconds above 0")

    def __str__(self) -> str:
        return f"TTFT <= {self.ttft_ms:g} ms, mean ITL <= {self.itl_ms:g} ms"


DEFAULT_OBJECTIVES = Objectives()


@dataclass(slots=True)
class Answered:
    """One request as its client saw it; times in seconds from when it was sent. With a fault the rest is incomplete."""

    fault: str | None = None
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itls: list[float] = field(default_factory=list)  # between pieces with text; one may hold several tokens
    num_tokens: int = 0  # of the answer, as the server counts; pieces with text if it does not say
    num_prompt: int | None = None

    @property
    def mean_itl_s(self) -> float:
        return sum(self.itls) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def meets(self, wanted: Objectives) -> bool:
        is_in_time = 1e3 * self.ttft_s <= wanted.ttft_ms and 1e3 * self.mean_itl_s <= wanted.itl_ms
        return self.fault is None and is_in_time


def read_answer(sent: float, pieces: Sequence[Piece], broken: str | None = None) -> Answered:
    """The bytes of one HTTP response; `broken` says why the connection ended, if not as it should."""
    answer, texts, ends = Answered(), list[float](), False
    try:
        for at, event in _events(pieces):
            if event is None:
                ends = True
                continue
            if "error" in event:
                raise ValueError(_reason(event))
            usage = event.get("usage") or {}
            answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)
            answer.num_prompt = usage.get("prompt_tokens", answer.num_prompt)
            for choice in event.get("choices") or ():
                ends = ends or choice.get("finish_reason") is not None
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    texts.append(at)
        if not ends:
            raise ValueError(broken or "the connection was closed before the answer was complete")
        if not texts:
            raise ValueError("the answer has no text")
    except (ValueError, TypeError, AttributeError) as error:
        answer.fault = " ".join(str(error).split())[:300]
    if texts:
        answer.ttft_s, answer.e2e_s = texts[0] - sent, texts[-1] - sent
        answer.itls = [later - sooner for sooner, later in pairwise(texts)]
        answer.num_tokens = answer.num_tokens or len(texts)
    return answer


def summary(answers: Sequence[Answered], wanted: Objectives) -> dict[str, object]:
    """Percentiles in milliseconds, and the share of requests that kept the objectives; failed ones kept none."""
    whole = [answer for answer in answers if answer.fault is None]
    return {
        "ttft_ms": percentiles([answer.ttft_s for answer in whole]),
        "itl_ms": percentiles([itl for answer in whole for itl in answer.itls]),
        "e2e_ms": percentiles([answer.e2e_s for answer in whole]),
        "goodput": round(sum(answer.meets(wanted) for answer in answers) / max(1, len(answers)), 4),
        "slo": asdict(wanted),
        "failed": len(answers) - len(whole),
    }


def print_latencies(seen: dict[str, Any], count: int, title: str = "") -> None:
    """What `summary` returned, as a table with goodput below it."""
    names = {"ttft_ms": "TTFT, ms", "itl_ms": "ITL, ms", "e2e_ms": "E2E, ms"}
    rows = [(name, *(seen[key][f"p{share}"] for share in SHARES)) for key, name in names.items()]
    print_table(("", *(f"P{share}" for share in SHARES)), rows, title)
    failed = f"; {seen['failed']} of {count} requests failed" if seen["failed"] else ""
    print(f"goodput: {seen['goodput']:.1%} of the requests had {Objectives(**seen['slo'])}{failed}", flush=True)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": round(1e3 * percentile(ordered, share), 1) for share in SHARES}


def percentile(ordered: Sequence[float], share: int) -> float:
    """The value that `share` percent do not exceed; 0 of nothing."""
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)] if ordered else 0.0


def _events(pieces: Sequence[Piece]) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """(when it was complete, event); None is the end that the server announced."""
    body = _Body()
    line = b""
    for at, data in pieces:
        *whole, line = (line + body.feed(data)).split(b"\n")
        for text in whole:
            if text.startswith(b"data:"):
                value = text[5:].strip()
                yield at, None if value == b"[DONE]" else json.loads(value)
    if body.status != 200:
        raise ValueError(f"status {body.status or 'none'}: {_reason_of(body.said)}")


class _Body:
    """The body of an HTTP response, whole or chunked, from bytes as they came."""

    def __init__(self) -> None:
        self.status = 0
        self.said = b""  # the beginning of the body, for a refusal
        self._raw = b""
        self._is_begun = self._is_chunked = False
        self._left = 0  # bytes of this chunk that are still to come, with its line end

    def feed(self, data: bytes) -> bytes:
        self._raw += data
        if not self._is_begun:
            head, end, rest = self._raw.partition(b"\r\n\r\n")
            if not end:
                return b""
            self._begin(head)
            self._raw = rest
        if self._is_chunked:
            body = self._unchunk()
        else:
            body, self._raw = self._raw, b""
        self.said = (self.said + body)[:4096]
        return body

    def _begin(self, head: bytes) -> None:
        first, *headers = head.split(b"\r\n")
        self._is_begun, self.status = True, int(first.split()[1])
        told = (header.lower().replace(b" ", b"") for header in headers)
        self._is_chunked = b"transfer-encoding:chunked" in told

    def _unchunk(self) -> bytes:
        body = b""
        while self._raw:
            if self._left:
                part = self._raw[: self._left]
                body += part[: max(0, self._left - 2)]  # not the line end behind the chunk
                self._raw, self._left = self._raw[len(part) :], self._left - len(part)
                continue
            size, end, rest = self._raw.partition(b"\r\n")
            if not end:
                break
            self._raw, self._left = rest, int(size.split(b";")[0], 16) + 2
        return body


def _reason_of(body: bytes) -> str:
    try:
        return _reason(json.loads(body))
    except (ValueError, AttributeError):
        return body.decode("utf-8", "replace")[:200]


def _reason(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)
