"""Strings as the tokens that hold them."""

from __future__ import annotations

from headway.text.breakers import DEFAULT_BREAKERS, BreakerTokens
from headway.text.tokenizer import Tokenizer
from vocabularies import byte_level, sentencepiece


def test_the_tokens_are_those_whose_text_holds_a_string() -> None:
    for inner in (byte_level(), sentencepiece()):
        tokenizer = Tokenizer(inner)
        tokens = BreakerTokens(tokenizer)
        for breakers in (DEFAULT_BREAKERS, ("e",), (" t", "he"), ("nothing holds this",), ("é",)):
            wanted = [
                index
                for index in range(tokenizer.vocab_size)
                if any(breaker.encode() in tokenizer.token_bytes(index) for breaker in breakers)
            ]
            assert list(tokens.of(breakers)) == wanted
        assert tokens.of((" ",)), "or nothing was looked for"
