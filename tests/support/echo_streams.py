"""Streams of an echo engine: their first tokens, the rest of them, and what they must be."""

from __future__ import annotations

from headway.engine.client import Output
from headway.engine.streams import OutputStream


async def grow(stream: OutputStream, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        output = await anext(stream)
        assert output.finish is None, output
        tokens += output.tokens
    return tokens


async def rest(stream: OutputStream) -> tuple[list[int], Output]:
    tokens: list[int] = []
    async for output in stream:
        tokens += output.tokens
    return tokens, output


def expected(prompt: list[int], count: int) -> list[int]:
    return (prompt * (count // len(prompt) + 1))[:count]
