"""Tokens to text, one token at a time: the pieces, joined, are exactly what decoding all at once gives.

Decoders of tokenizers come in two common shapes, and for those a piece depends on little state:

* byte level (GPT-2, Llama 3, Qwen): a token is bytes, and the text is all bytes read as UTF-8. What is
  incomplete waits in an incremental UTF-8 decoder.
* byte fallback (SentencePiece: Llama 2, Mistral): a token is text, with "▁" for a space, or one byte. A run of
  bytes is text if all of it is valid UTF-8, else one replacement character per byte; so a run waits for its end.

For other decoders `tokenizers.decoders.DecodeStream` does the work. It is not used for the first two, because it
fails on tokens that are not valid UTF-8 (which a model at a high temperature does make), and its cost grows with
the number of tokens that wait.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class DetokenizeStream(Protocol):
    """Text of a growing token sequence."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete, or for a skipped token."""
        ...

    def flush(self) -> str:
        """The text still held back, with replacement characters for what never became complete."""
        ...


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (bytes_to_unicode in its encoder.py), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token that is not written in the stand-ins is its own text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of a token such as "<0x0A>"; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class DecoderShape:
    """Which of the shapes a tokenizer's decoder has.

    Attributes:
        kind: "byte_level", "byte_fallback" or "other".
        strips_space: of "byte_fallback": whether a space at the start of the text is dropped.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        steps = state.get("decoders", [state])
        kinds = [step.get("type") for step in steps]
        self.kind, self.strips_space = "other", False
        if kinds == ["ByteLevel"]:
            self.kind = "byte_level"
        elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_mark(steps[0]):
            strip = steps[3] if len(steps) == 4 else None
            if len(steps) == 3 or (strip and _is_leading_strip(strip)):
                self.kind, self.strips_space = "byte_fallback", strip is not None


def _is_space_mark(step: dict[str, object]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _is_leading_strip(step: dict[str, object]) -> bool:
    return step.get("type") == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


class ByteLevelStream:
    """A stream over tokens that are bytes. `token_bytes` gives a token's bytes, b"" for one that is skipped."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """A stream over SentencePiece tokens. `token` gives a token as in the vocabulary, None for one skipped."""

    def __init__(self, token: Callable[[int], str | None], strips_space: bool) -> None:
        self._token = token
        self._strip = strips_space
        self._run = bytearray()

    def step(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        byte = fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._end_run() + self._emit(token.replace("▁", " "))

    def flush(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return self._emit(run.decode())
        except UnicodeDecodeError:
            return self._emit(REPLACEMENT * len(run))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class GenericStream:
    """A stream for any decoder, by way of `DecodeStream`; it keeps all ids to make the end exact."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._sent = 0

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._stream is None:
            return ""
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # its error type is plain Exception: the text before has changed; the end will tell
            self._stream = None
            return ""
        self._sent += len(piece)
        return piece

    def flush(self) -> str:
        rest = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[self._sent :]
        self._sent += len(rest)
        return rest
