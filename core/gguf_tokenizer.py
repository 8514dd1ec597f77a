"""Builds a tokenizer from the metadata of a GGUF file.

Keys are described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. How text is cut into words is not
in the file, only its name ("tokenizer.ggml.pre"); the rules below are those of the models that the names stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from .errors import ModelError
from .models.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # llama.cpp's llama_token_type
OTHERWISE = "Give the model's own tokenizer with --tokenizer (a directory, or a Hugging Face id)"

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _regex_words(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {
    "gpt-2": _gpt2_words,
    "default": _gpt2_words,
    "smollm": _smollm_words,
    "llama-bpe": lambda: _regex_words(LLAMA3_WORDS),
    "qwen2": lambda: _regex_words(QWEN2_WORDS),
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes: byte-level BPE ("gpt2") or SentencePiece ("llama").

    Raises:
        ModelError: the file has none, or one of another kind, or its parts do not fit together.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: tokenizer {model!r} is not supported, only 'gpt2' and 'llama'. {OTHERWISE}.")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens), NORMAL)
    try:
        tokenizer = _byte_level(file, tokens) if model == "gpt2" else _sentencepiece(file, tokens, kinds)
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, kind in zip(tokens, kinds.tolist(), strict=True)
                if kind in (CONTROL, USER_DEFINED) and token
            ]
        )
        _add_ends(file, tokenizer, tokens, default_bos=model == "llama")
    except ModelError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise ModelError(f"{file.path}: the tokenizer's parts do not fit together ({error}). {OTHERWISE}.") from error
    if tokenizer.get_vocab_size() > len(tokens):
        raise ModelError(f"{file.path}: the tokenizer's tokens do not fit together. {OTHERWISE}.")
    return tokenizer


def token_text(file: GGUFFile, name: str) -> str | None:
    """The text of a named token, such as "bos"; None where the file has none."""
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(index, int) or not isinstance(tokens, list) or not 0 <= index < len(tokens):
        return None
    return tokens[index]


def _texts(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelError(f"{file.path}: {key} is missing. {OTHERWISE}.")
    return value


def _numbers(file: GGUFFile, key: str, count: int, default: float | None = None) -> np.ndarray:
    value = file.metadata.get(key)
    if value is None and default is not None:
        return np.full(count, default)
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise ModelError(f"{file.path}: {key} does not have one number for each of the {count} tokens. {OTHERWISE}.")
    return value


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{file.path}: pre-tokenizer {pre!r} is not known (known: {known}). {OTHERWISE}.")
    merges = [merge.partition(" ")[::2] for merge in _texts(file, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as that token, whatever the merges would make of it.
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: np.ndarray) -> Tokenizer:
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens)).tolist()
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, kinds.tolist(), strict=True) if kind == UNKNOWN), None)
    model = BPE(vocab=vocab, merges=_merges(vocab, scores, kinds), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], kinds: np.ndarray) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the best-scored token: a merge list in the order of scores."""
    ranked = []
    for token, index in vocab.items():
        if kinds[index] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_ends(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], default_bos: bool) -> None:
    """Sets which tokens are put around every text, as llama.cpp does where the file does not say."""
    default_bos = default_bos or file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = token_text(file, "bos") if file.metadata.get("tokenizer.ggml.add_bos_token", default_bos) else None
    eos = token_text(file, "eos") if file.metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        # Token names may hold the template's own syntax (":" or "$"), so they go by placeholders.
        template = ["BOS"] * bool(bos) + ["$A"] + ["EOS"] * bool(eos)
        ids = {"BOS": bos, "EOS": eos}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=[
                {"id": name, "ids": [tokens.index(token)], "tokens": [token]} for name, token in ids.items() if token
            ],
        )
