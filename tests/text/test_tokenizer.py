"""The tokenizer facade: round trips, single tokens, and what is refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from headway.errors import ModelFormatError, RequestError
from headway.text.tokenizer import Spelling, Tokenizer
from serve_harness import byte_vocabulary
from vocabularies import byte_level, sentencepiece, words

TEXTS = ["", "hello world", "  two  spaces", "naïve 日本 🙂", "a\n\nb"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_text_survives_a_round_trip(make: object, text: str) -> None:
    tokenizer = Tokenizer(make())  # type: ignore[operator]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_a_text_are_parsed_and_skipped_on_the_way_back() -> None:
    tokenizer = Tokenizer(byte_level())
    end = tokenizer.token_to_id("<end>")
    assert end in tokenizer.special_ids
    assert tokenizer.encode("a<end>b").count(end) == 1
    assert tokenizer.decode(tokenizer.encode("a<end>b")) == "ab"


def test_begin_token_only_if_asked_for() -> None:
    tokenizer = Tokenizer(sentencepiece())
    begin = tokenizer.token_to_id("<s>")
    assert tokenizer.encode("a")[0] == begin
    assert begin not in tokenizer.encode("a", add_special=False)


def test_bytes_of_single_tokens_add_up_to_the_text() -> None:
    for make in (byte_level, sentencepiece):
        tokenizer = Tokenizer(make())
        ids = tokenizer.encode("é 日本 hello", add_special=False)
        joined = b"".join(tokenizer.token_bytes(index) for index in ids).decode()
        assert joined.removeprefix(" ") == "é 日本 hello"


def test_part_of_a_character_shows_as_replacement() -> None:
    tokenizer = Tokenizer(byte_level())
    first = tokenizer.encode("🙂")[0]
    assert tokenizer.token_bytes(first) == b"\xf0"
    assert tokenizer.token_text(first) == "\ufffd"


def test_ids_outside_the_vocabulary_are_no_tokens() -> None:
    tokenizer = Tokenizer(byte_level())
    for index in (tokenizer.vocab_size, 2**31, 2**40, -1):
        assert tokenizer.id_to_token(index) is None
        assert tokenizer.token_bytes(index) == b""


def test_spelling_follows_the_decoder() -> None:
    assert Tokenizer(byte_level()).spelling is Spelling.BYTES
    assert Tokenizer(sentencepiece()).spelling is Spelling.PIECES
    assert Tokenizer(words()).spelling is Spelling.OTHER


def test_lengths_in_the_file_do_not_cut_prompts() -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert Tokenizer(inner).decode(Tokenizer(inner).encode("hello world")) == "hello world"


def test_half_a_surrogate_pair_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        Tokenizer(byte_level()).encode("a\ud83d")


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'{"version": "1.0", "model": {"type": "BPE"}}', b"\xff"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.open(path)
    with pytest.raises(ModelFormatError, match=r"missing\.json"):
        Tokenizer.open(tmp_path / "missing.json")


def test_a_text_beyond_a_limit_is_not_tokenized_to_its_end() -> None:
    made = Tokenizer(byte_vocabulary())
    assert made.longest_token == len("<|end|>")
    assert made.encode_within("a" * 100, 100) == made.encode("a" * 100)
    assert made.encode_within("a" * 101, 100) == made.encode("a" * 101)  # a little too long: counted
    assert made.encode_within("a" * 701, 100) is None  # no 100 tokens spell 701 characters
    assert made.encode_within("a" * 9_000, 2_000) == made.encode("a" * 9_000)


def test_a_long_text_is_judged_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tokenizer(byte_vocabulary())
    lengths: list[int] = []
    whole = made.encode

    def counted(text: str, add_special: bool = True) -> list[int]:
        lengths.append(len(text))
        return whole(text, add_special)

    monkeypatch.setattr(made, "encode", counted)
    made.longest_token = 1000
    assert made.encode_within("a" * 500_000, 1000) is None
    assert lengths == [8000]


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    made = Tokenizer(byte_vocabulary())
    text = "abc " * 500_000
    longest = took = 0.0
    for _ in range(5):
        done = threading.Event()
        thread = threading.Thread(target=lambda done=done: (made.encode(text), done.set()))
        begun = last = time.monotonic()
        thread.start()
        pause = 0.0
        while not done.is_set():
            now = time.monotonic()
            pause, last = max(pause, now - last), now
        thread.join()
        took, longest = time.monotonic() - begun, pause
        if longest < took / 2:
            break
    assert longest < took / 2, f"held up for {longest:.3f} of {took:.3f} s"
