"""Small tokenizers of every kind, made in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors


def byte_level() -> Tokenizer:
    """All 256 bytes, a few merges (one of them ends inside a character), one special and one added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("æ", "Ĺ"), ("a", "æ")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=False), AddedToken("<ünd x>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Byte tokens, letters and a few pieces with the visible space; drops the space it puts in front."""
    pieces = ["▁", *"abcdehlorw", "he", "ll", "hell", "hello", "▁hello", "▁a", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "a")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<end>")]
    tokenizer.add_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def words() -> Tokenizer:
    """Whole words joined by spaces: the text of a token depends on what stands before it."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
