"""Log-probabilities in the protocol's three shapes: completions', chat's, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.engine.types import TokenLogprobs
from ..core.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is part of a character is written as OpenAI does, "bytes:\\xe2\\x82"."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Builds completions' logprobs over the deltas of one completion.

    Args:
        tokenizer: names the tokens and says how much text each one makes.
        skip_special_tokens: whether special tokens make no text.
        offset: characters of the text before its first token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, offset: int = 0) -> None:
        self._tokenizer, self._offset = tokenizer, offset
        self._stream = tokenizer.stream(skip_special_tokens)

    def first(self, token: int) -> dict[str, Any]:
        """An echoed prompt's first token, which nothing predicts."""
        return self._record([token], [None], [None])

    def add(self, logprobs: Sequence[TokenLogprobs], count: int) -> dict[str, Any]:
        """The next tokens, with the `count` likeliest ones at each."""
        tops = [_top(self._tokenizer, entry, count) for entry in logprobs]
        return self._record([e.token for e in logprobs], [max(e.logprob, LOWEST) for e in logprobs], tops)

    def _record(self, tokens: list[int], values: Sequence[float | None], tops: Sequence[Any]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.step(token))
        names = [token_text(self._tokenizer, token) for token in tokens]
        return {"tokens": names, "token_logprobs": list(values), "top_logprobs": list(tops), "text_offset": offsets}


def _top(tokenizer: Tokenizer, entry: TokenLogprobs, count: int) -> dict[str, float]:
    """The likeliest tokens by text, and the chosen one, which the protocol promises to be among them."""
    out: dict[str, float] = {}
    pairs = [*zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True), (entry.token, entry.logprob)]
    for token, value in pairs:
        out.setdefault(token_text(tokenizer, token), max(value, LOWEST))
    return out


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several records, one after the other."""
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            out[name] += values
    return out


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], count: int) -> dict[str, Any]:
    """Chat's logprobs of some tokens, with the `count` likeliest ones at each."""

    def item(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": max(value, LOWEST), "bytes": list(data)}

    content = []
    for entry in logprobs:
        tops = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
        content.append({**item(entry.token, entry.logprob), "top_logprobs": [item(*top) for top in tops]})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprobs] | None, count: int
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: null for the first token, then objects by token id."""
    out: list[dict[str, Any] | None] = [None]
    for entry in logprobs or ():
        ranked = [
            (token, value, rank)
            for rank, (token, value) in enumerate(
                zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True), start=1
            )
        ]
        if entry.token not in entry.top_ids[:count]:
            ranked.insert(0, (entry.token, entry.logprob, entry.rank))
        out.append(
            {
                str(token): {
                    "logprob": max(value, LOWEST),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, token) if tokenizer else None,
                }
                for token, value, rank in ranked
            }
        )
    return out
