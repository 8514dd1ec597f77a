"""SamplingParams: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import RequestError

MAX_LOGPROBS = 32
MAX_STOP_STRINGS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. The defaults sample from the model's own distribution (temperature 1), 16 tokens.

    Attributes:
        n: completions for the prompt, drawn independently; its KV cache is computed once.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: keep the k likeliest tokens; 0 (or -1) keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        repetition_penalty: > 1 makes tokens of the prompt and of the output less likely (CTRL, arXiv 1909.05858).
        presence_penalty: subtracted from the logit of each token that the output already has, in [-2, 2].
        frequency_penalty: subtracted once for each time the output has the token, in [-2, 2].
        logit_bias: added to the logits, by token id; -100 and below bans in practice, -inf for certain.
        bad_token_ids: token sequences that must not be generated.
        bad_words: strings that must not be generated; the tokenizer turns them into bad_token_ids.
        allowed_token_ids: when given, only these tokens can be generated.
        max_tokens: most tokens to generate; None is up to the context's end.
        min_tokens: no end-of-sequence and no stop token before so many.
        stop: strings that end the output; the text before the first of them is returned.
        stop_token_ids: tokens that end the output, as end-of-sequence does.
        include_stop_str_in_output: whether the stop string is part of the returned text.
        ignore_eos: go on after the end-of-sequence token.
        seed: 64-bit; the same seed draws the same tokens, whatever else runs. None: a fresh one each time.
        logprobs: log-probabilities of the chosen token and of so many likeliest ones; None is none. They are
            of the model's own distribution, before penalties and temperature.
        prompt_logprobs: the same for each prompt token.
        detokenize: whether text is made of the tokens (off: token ids only, and no stop strings).
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_token_ids: Sequence[Sequence[int]] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a step needs the tokens before it on the host, so it cannot be launched ahead of them."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.bad_token_ids
        )

    def replaced(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def _check_numbers(self) -> None:
        for name, low, high, open_low in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name} must be a number, not {type(value).__name__}.", name)
            if name in _INTEGERS and not isinstance(value, int):
                raise RequestError(f"{name} must be a whole number, not {value!r}.", name)
            too_low = value <= low if open_low else value < low
            if math.isnan(value) or math.isinf(value) or too_low or value > high:
                raise RequestError(f"{name} must be {_range_text(low, high, open_low)}, got {value}.", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).",
                "min_tokens",
            )

    def _check_lists(self) -> None:
        if not all(isinstance(s, str) for s in self.stop):
            raise RequestError("stop must be a string or a list of strings.", "stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"At most {MAX_STOP_STRINGS} stop strings can be given.", "stop")
        if any(not s for s in self.stop):
            raise RequestError("A stop string must not be empty.", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("Stop strings need detokenize=True; use stop_token_ids without it.", "stop")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError("allowed_token_ids must name at least one token.", "allowed_token_ids")
        if any(not len(words) for words in self.bad_token_ids or ()):
            raise RequestError("A sequence in bad_token_ids must not be empty.", "bad_token_ids")
        for token, bias in (self.logit_bias or {}).items():
            if math.isnan(bias) or bias == math.inf:
                raise RequestError(f"logit_bias of token {token} must be a number or -inf.", "logit_bias")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError for a token id outside the model's vocabulary."""
        named: list[tuple[str, Any]] = [
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_token_ids", [t for words in self.bad_token_ids or () for t in words]),
        ]
        for name, ids in named:
            for token in ids:
                if not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} names token {token!r}; this model's tokens are 0 to {vocab_size - 1}.", name
                    )


# field, lowest, highest, whether the lowest itself is excluded
_RANGES: list[tuple[str, float, float, bool]] = [
    ("n", 1, 128, False),
    ("temperature", 0.0, 100.0, False),
    ("top_k", 0, 2**31 - 1, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("max_tokens", 1, 2**31 - 1, False),
    ("min_tokens", 0, 2**31 - 1, False),
    ("seed", -(2**63), 2**64 - 1, False),
    ("logprobs", 0, MAX_LOGPROBS, False),
    ("prompt_logprobs", 0, MAX_LOGPROBS, False),
]
_INTEGERS = {"n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"}


def _range_text(low: float, high: float, open_low: bool) -> str:
    lower = f"greater than {low}" if open_low else f"at least {low}"
    return lower if high >= 2**31 - 1 else f"{lower} and at most {high}"


def sampling_fields() -> tuple[str, ...]:
    """The names of all fields, for a backend that declares which of them it supports."""
    return tuple(f.name for f in fields(SamplingParams))
