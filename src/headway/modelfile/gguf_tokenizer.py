"""The vocabulary of a GGUF file as a `tokenizers.Tokenizer`.

Owns the two kinds of vocabulary GGUF knows: byte-level BPE with its merges (`gpt2`), and SentencePiece pieces with
scores (`llama`), and how each family splits text before merging. Refuses to know what a chat is, and what the ids
mean to a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.errors import ModelFormatError
from headway.modelfile.gguf import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Every way to cut a piece in two is tried; the largest vocabularies have 2 million characters in all.
_MAX_PIECE_CHARS, _MAX_PIECES_CHARS = 256, 1 << 23

_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS"""
_REST = r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a family cuts text into the words that merges never cross."""

    pattern: str | None = None  # None: the pattern of GPT-2
    splits_digits: bool = False  # each digit alone, before the pattern sees the text
    is_composed: bool = False  # Unicode NFC first
    ignores_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # the default of a file that does not say


_GPT2 = Splitting()
_DIGITS = Splitting(splits_digits=True)
_LLAMA3 = Splitting(_WORDS.replace("NUMBERS", "{1,3}") + _REST, ignores_merges=True, adds_bos=True)
_QWEN2 = Splitting(_WORDS.replace("NUMBERS", "") + _REST, is_composed=True)

SPLITTINGS: Mapping[str, Splitting] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "gpt2": _GPT2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; `types` is as long as `tokens`, no token appears twice."""

    tokens: tuple[str, ...]
    types: Sequence[int]

    def token(self, index: object) -> str | None:
        """The token with this id, if it is one."""
        is_id = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(self.tokens)
        return self.tokens[index] if is_id and isinstance(index, int) else None


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """The tokens of the file and their types, checked to fit each other."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens or not isinstance(tokens[0], str):
        raise ModelFormatError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [_NORMAL] * len(tokens)
    if not isinstance(types, Sequence) or isinstance(types, str | tuple) or len(types) != len(tokens):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.token_type does not name one type for each token")
    if len(set(tokens)) != len(tokens):
        raise ModelFormatError(f"{file.path} holds a token twice; its vocabulary is broken")
    return Vocabulary(tokens, types)


def convert(file: GGUFFile) -> Tokenizer:
    """A tokenizer that gives the ids this file's model was trained on."""
    vocabulary = read_vocabulary(file)
    try:
        return _convert(file, vocabulary)
    except ModelFormatError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(f"{file.path}: its vocabulary does not fit together: {error}") from None


def _convert(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import AddedToken

    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, vocabulary)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocabulary), True
    else:
        raise ModelFormatError(f"{file.path} has a vocabulary of kind {kind!r}; allowed: gpt2, llama")
    added = [
        AddedToken(token, special=type_of != _USER_DEFINED, normalized=False)
        for token, type_of in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if type_of in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    _add_ends(tokenizer, file, vocabulary, adds_bos)
    return tokenizer


def _byte_level(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.metadata.get("tokenizer.ggml.pre", "default")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise ModelFormatError(
            f"{file.path} splits text by the rule {name!r} (tokenizer.ggml.pre); allowed: {', '.join(SPLITTINGS)}"
        )
    merges = _merges(file)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.ignores_merges))
    steps: list[PreTokenizer] = []
    if splitting.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if splitting.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise ModelFormatError(f"{file.path} has a byte-level vocabulary but no merges (tokenizer.ggml.merges)")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or not left or not right:
            raise ModelFormatError(f"{file.path}: the merge {merge!r} is not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, Sequence) or isinstance(scores, str | tuple) or len(scores) != len(vocabulary.tokens):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.scores does not hold one score for each token")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.token(file.metadata.get("tokenizer.ggml.unknown_token_id", 0))
    merges = _merges_of_scores(vocabulary, scores, ids)
    has_bytes = _BYTE in vocabulary.types
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    tokenizer = Tokenizer(model)
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(vocabulary: Vocabulary, scores: Sequence[float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every way to make a piece, best piece first."""
    mergeable = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _NORMAL}
    if sum(map(len, mergeable)) > _MAX_PIECES_CHARS or max(map(len, mergeable), default=0) > _MAX_PIECE_CHARS:
        raise ModelFormatError(
            f"its pieces are longer than {_MAX_PIECE_CHARS} characters or have more than {_MAX_PIECES_CHARS} together"
        )
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in mergeable:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[ids[piece]], ids[left], ids[right], (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _add_ends(tokenizer: Tokenizer, file: GGUFFile, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Let `encode` put the begin and end tokens where the file asks for them."""
    from tokenizers import processors

    single = ["$A"]
    special: list[tuple[str, int]] = []
    for side, key, default in (("bos", "add_bos_token", adds_bos), ("eos", "add_eos_token", False)):
        index = file.metadata.get(f"tokenizer.ggml.{side}_token_id")
        token = vocabulary.token(index)
        if file.metadata.get(f"tokenizer.ggml.{key}", default) is not True or token is None:
            continue
        assert isinstance(index, int)
        if token not in (name for name, _ in special):
            special.append((token, index))
        single = [token, *single] if side == "bos" else [*single, token]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
