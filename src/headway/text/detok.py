"""Tokens to text while an answer grows.

Owns one rule: whatever way the tokens arrive, the pieces given out add up to `tokenizer.decode` of them all, and no
piece ends inside a character. So text is held back exactly as long as a later token could still change it.
Refuses to know stop strings (`stop`) and requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from headway.text.tokenizer import Spelling, Tokenizer


class _Speller(Protocol):
    @property
    def texts(self) -> Mapping[int, str | None] | None: ...

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The pieces so far are a prefix of the decoded text of every continuation; `flush` gives the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, shown_ids: Collection[int] = ()) -> None:
        """`shown_ids` are special tokens that are shown as others are."""
        self._skipped = tokenizer.special_ids.difference(shown_ids) if skip_special else frozenset()
        self._speller: _Speller
        if tokenizer.spelling is Spelling.BYTES:
            self._speller = _ByteSpeller(tokenizer)
        elif tokenizer.spelling is Spelling.PIECES:
            self._speller = _PieceSpeller(tokenizer)
        else:
            self._speller = _WindowSpeller(tokenizer)

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        """What pushing a token would show now and change nothing, by token, without special ones; None: not known.

        It stays true until something is pushed.
        """
        return self._speller.texts

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        skipped = self._skipped
        if len(ids) == 1:  # nearly always
            return "" if ids[0] in skipped else self._speller.push(ids)
        return self._speller.push([index for index in ids if index not in skipped])

    def flush(self) -> str:
        """What was held back; nothing may be pushed after it."""
        return self._speller.flush()


class _ByteSpeller:
    """Holds at most three bytes: the start of a character whose rest has not come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False
        self._whole_texts = tokenizer.whole_texts

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        return None if self._holds else self._whole_texts

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._holds and (whole := self._whole_texts[ids[0]]) is not None:
            return whole  # as the decoder would have it, in a quarter of the time
        spell = self._tokenizer.token_bytes
        text = self._decoder.decode(b"".join([spell(index) for index in ids]))
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _PieceSpeller:
    """Holds the run of byte tokens at the end: one bad byte anywhere in a run spoils all of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._drops_space = tokenizer.strips_first_space
        self.texts = None

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for index in ids:
            byte = self._tokenizer.raw_byte(index)
            if byte is not None:
                self._run.append(byte)
            elif self._tokenizer.id_to_token(index) is not None:  # an id that is no token does not end a run
                parts.append(self._end_run())
                parts.append(self._tokenizer.token_bytes(index).decode())
        return self._without_first_space("".join(parts))

    def flush(self) -> str:
        return self._without_first_space(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _without_first_space(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


class _WindowSpeller:
    """For decoders we cannot take apart: decodes the last few tokens again and gives out what grew.

    ids   … [ shown, kept as context ][ not yet shown ]
             ^ context                 ^ shown        ^ end
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0
        self._text: list[str] = []
        self.texts = None

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        piece = now[len(before) :]
        self._text.append(piece)
        return piece

    def flush(self) -> str:
        return self._decode(self._ids)[len("".join(self._text)) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)
