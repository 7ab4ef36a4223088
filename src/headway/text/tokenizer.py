"""Text to token ids and back, and what each token alone stands for.

Owns the `tokenizers` library: nothing else in headway calls it with text. Tells byte-level vocabularies, SentencePiece
vocabularies and others apart, because only for the first two the text of a growing answer is known piece by piece
(`detok`). Refuses to know chats, stop strings and models.

Special tokens written in a text (`<|im_end|>` typed by a user) are parsed as special tokens, as `transformers` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import tokenizers

from headway.errors import ModelFormatError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's visible space
_USUAL_TOKEN_CHARS = 8  # twice what a token of plain text spells
_LEAST_PART = 4096
_LONG_IDS = 2048
_CUT_TOKENS = 16
_SHRINKING = 4  # how much shorter a normalizer may make a text


class Spelling(Enum):
    """How the tokens of a vocabulary spell text."""

    BYTES = "bytes"  # every token is a string of bytes; the text is their concatenation, decoded
    PIECES = "pieces"  # every token is text, but for tokens of one raw byte each
    OTHER = "other"  # the text of a token depends on its neighbours


class Tokenizer:
    """Pure after construction: the same text gives the same ids, and threads may share it."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may carry the lengths its training used; a served prompt is never cut in silence.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        added = inner.get_added_tokens_decoder()
        self._added_ids = {token.content: index for index, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.spelling, self.strips_first_space = _spelling(inner)
        self._byte_of = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self.whole_texts = WholeTexts(self)
        self.longest_token = _longest_token(inner, self.spelling)

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception
            raise ModelFormatError(f"{path} is not a tokenizer headway can use: {error}") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a Rust panic is no Exception, but it is the file's fault
                raise
            raise ModelFormatError(f"{path} is not a tokenizer headway can use: {error}") from None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. `add_special` adds the begin and end tokens the model asks for."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text holds half of a surrogate pair, which is no character; send UTF-8") from None
        # Of the library's calls this one lets other threads run meanwhile, and it computes no offsets.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def encode_within(self, text: str, limit: int, add_special: bool = True) -> list[int] | None:
        """As `encode`, or None once it is certain that there are more than `limit` tokens.

        Neither time nor memory grow with a text that is far too long: one that no `limit` tokens can spell is not
        read at all, of others a part is tried first. Cutting a text changes tokens near the cut alone, so a part with a
        quarter more tokens than allowed settles it.
        """
        if len(text) > limit * self.longest_token:
            return None
        part = max(_LEAST_PART, _USUAL_TOKEN_CHARS * limit)
        while part < len(text):
            if len(self.encode(text[:part], add_special=False)) > limit + limit // 4 + _CUT_TOKENS:
                return None
            part *= 4
        return self.encode(text, add_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        if len(ids) > _LONG_IDS:  # this call lets other threads run meanwhile, and costs more
            return str(self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special)[0])
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def token_to_id(self, token: str) -> int | None:
        index: int | None = self._inner.token_to_id(token)
        return index

    def added_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Those of these texts that are a token of their own, wherever they stand."""
        return {text: self._added_ids[text] for text in texts if text in self._added_ids}

    def id_to_token(self, index: int) -> str | None:
        """The token as the vocabulary writes it, with its stand-ins for spaces and bytes."""
        token: str | None = self._inner.id_to_token(index) if 0 <= index < 1 << 32 else None
        return token

    def token_bytes(self, index: int) -> bytes:
        """The bytes this token adds to a text; empty for an id that is no token."""
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._spell(index)
        return known

    def token_text(self, index: int) -> str:
        """The token as shown to people; a part of a character shows as U+FFFD."""
        return self.token_bytes(index).decode("utf-8", "replace")

    def raw_byte(self, index: int) -> int | None:
        """The byte a SentencePiece byte token stands for."""
        match = _BYTE_TOKEN.fullmatch(self.id_to_token(index) or "")
        return int(match[1], 16) if match and self.spelling is Spelling.PIECES else None

    def _spell(self, index: int) -> bytes:
        token = self.id_to_token(index)
        if token is None:
            return b""
        if self.spelling is Spelling.BYTES:
            byte_of = self._byte_of
            is_spelled = all(char in byte_of for char in token)
            return bytes(byte_of[char] for char in token) if is_spelled else token.encode()
        if self.spelling is Spelling.PIECES:
            byte = self.raw_byte(index)
            return bytes([byte]) if byte is not None else token.replace(_SPACE, " ").encode()
        return self.decode([index], skip_special=False).encode()


class WholeTexts(dict[int, str | None]):
    """Token -> its text, if that is made of whole characters; None for others and special ones. It fills as asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(dict.fromkeys(tokenizer.special_ids))
        self._tokenizer = tokenizer

    def __missing__(self, index: int) -> str | None:
        try:
            self[index] = self._tokenizer.token_bytes(index).decode()
        except UnicodeDecodeError:
            self[index] = None
        return self[index]


def _longest_token(inner: tokenizers.Tokenizer, spelling: Spelling) -> int:
    """The most characters of a text that one token can stand for.

    A byte-level vocabulary spells a character by one to four others, so that its tokens are no shorter than their text.
    """
    longest = max((len(token) for token in inner.get_vocab(with_added_tokens=True)), default=1)
    is_exact = inner.normalizer is None and spelling is not Spelling.OTHER
    return max(1, longest) * (1 if is_exact else _SHRINKING)


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte: itself if printable, else one above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _spelling(inner: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How tokens spell text, and whether the first space of a text is dropped."""
    if inner.decoder is None:
        return Spelling.OTHER, False
    decoder = json.loads(inner.decoder.__getstate__())
    if decoder.get("type") == "ByteLevel":
        return Spelling.BYTES, False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        pieces = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if steps in (pieces, [*pieces, strip]):
            return Spelling.PIECES, steps[-1] == strip
    return Spelling.OTHER, False
