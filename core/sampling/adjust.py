"""Which logits of a request are changed before sampling: the entries behind `SamplingInput.adjust_*`.

Host side, one object per request. A request names few tokens, so its penalties, biases and bans travel as short
lists of entries rather than as a row over the vocabulary. Penalties are kept up to date token by token; bans
that depend on the moment (min_tokens, sequences in bad_token_ids) are added to the lists when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import RequestError
from .params import SamplingParams


class Entries(NamedTuple):
    """One request's entries for one step; each id occurs once. Valid until the next `observe`: may be views.

    Attributes:
        ids: int32 [a]; token ids.
        bias: float32 [a]; added to the logit; -inf bans.
        counts: int32 [a]; how often the output has the token.
        seen: bool [a]; whether prompt or output have it, where there is a repetition penalty.
    """

    ids: np.ndarray
    bias: np.ndarray
    counts: np.ndarray
    seen: np.ndarray


class Adjustments:
    """The entries of one request, followed through its output.

    With allowed_token_ids, only allowed tokens have entries: having one is what lets a token be generated.

    Attributes:
        only_adjusted: tokens without an entry are banned.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | np.ndarray,
        eos_token_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        """Raises RequestError where allowed_token_ids leaves no token that is not banned as well."""
        self.only_adjusted = params.allowed_token_ids is not None
        self._allowed = None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self._ids = np.empty(0, np.int32)
        self._bias = np.empty(0, np.float32)
        self._counts = np.empty(0, np.int32)
        self._seen = np.empty(0, bool)

        self._repetition = params.repetition_penalty != 1.0
        self._counting = bool(self._repetition or params.presence_penalty or params.frequency_penalty)

        self._add(params.allowed_token_ids or ())
        for token, bias in (params.logit_bias or {}).items():
            self._set_bias(token, bias)
        # Sequences by the last token before the banned one: only those that can match are looked at.
        self._sequences: dict[int, list[tuple[int, ...]]] = {}
        for sequence in params.bad_token_ids or ():
            if len(sequence) == 1:
                self._set_bias(sequence[0], -math.inf)
            else:
                self._sequences.setdefault(sequence[-2], []).append(tuple(sequence))
        self._history_size = max((len(s) - 1 for group in self._sequences.values() for s in group), default=0)
        self._history: list[int] = []
        self._num_output = 0

        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._min_tokens = params.min_tokens
        self._stops = [token for token in sorted(stops) if self._may_enter(token)] if self._min_tokens else []
        self._check_allowed()
        if self._repetition:
            entries = self._add(np.unique(np.asarray(prompt_token_ids, np.int64)).tolist())
            self._seen[entries] = True

    @property
    def active(self) -> bool:
        """Whether the next step, or a later one, can have entries; False means that `entries` is empty."""
        return bool(self._index or self._counting or self._sequences or self._stops_banned(self._num_output))

    def max_entries(self, max_tokens: int) -> int:
        """The most entries that any step can have when at most `max_tokens` tokens are generated."""
        most = len(self._index) + len(self._stops) + sum(len(group) for group in self._sequences.values())
        most += max_tokens if self._counting else 0
        return min(most, self._vocab_size if self._allowed is None else len(self._allowed))

    def observe(self, token: int) -> None:
        """Takes note of an output token. To be called for each, in order; amortised O(1)."""
        self._num_output += 1
        if self._history_size:
            self._history = [*self._history, token][-self._history_size :]
        if self._counting:
            entry = self._add((token,))
            self._counts[entry] += 1
            self._seen[entry] = self._repetition

    def entries(self, num_output_tokens: int) -> Entries:
        """The entries for drawing the output token with this index.

        Args:
            num_output_tokens: how many tokens the output has before it. It may be ahead of the tokens that were
                observed, unless `SamplingParams.needs_history`.
        """
        size = len(self._index)
        current = Entries(self._ids[:size], self._bias[:size], self._counts[:size], self._seen[:size])
        banned = self._banned_now(num_output_tokens)
        if not banned:
            return current
        bias = current.bias.copy()
        bias[[self._index[token] for token in banned if token in self._index]] = -math.inf
        new = [token for token in banned if token not in self._index]
        return Entries(
            np.concatenate([current.ids, np.asarray(new, np.int32)]),
            np.concatenate([bias, np.full(len(new), -math.inf, np.float32)]),
            np.concatenate([current.counts, np.zeros(len(new), np.int32)]),
            np.concatenate([current.seen, np.zeros(len(new), bool)]),
        )

    def _banned_now(self, num_output_tokens: int) -> list[int]:
        """Tokens, each once, that only the present state of the output bans."""
        banned = dict.fromkeys(self._stops if self._stops_banned(num_output_tokens) else ())
        if self._history:
            for sequence in self._sequences.get(self._history[-1], ()):
                before = sequence[:-1]
                if tuple(self._history[-len(before) :]) == before and self._may_enter(sequence[-1]):
                    banned[sequence[-1]] = None
        return list(banned)

    def _stops_banned(self, num_output_tokens: int) -> bool:
        return bool(self._stops) and num_output_tokens < self._min_tokens

    def _may_enter(self, token: int) -> bool:
        """Whether a token may have an entry: it is in the vocabulary, and allowed where that is limited.

        Prompts can have placeholders outside the vocabulary, and a configuration can name such ends of sequence.
        """
        return 0 <= token < self._vocab_size and (self._allowed is None or token in self._allowed)

    def _set_bias(self, token: int, bias: float) -> None:
        entry = self._add((token,))  # first: it may replace the arrays
        self._bias[entry] += bias

    def _add(self, tokens: Iterable[int]) -> list[int]:
        """Makes entries for those tokens that have none and may; returns the entries' indices."""
        tokens = [token for token in dict.fromkeys(tokens) if self._may_enter(token)]
        for token in tokens:
            if token not in self._index:
                self._index[token] = len(self._index)
        old, size = len(self._ids), len(self._index)
        if size > old:
            # Capacity grows by halves, so that appending costs O(1) on average.
            extra = size + size // 2 + 8 - old
            self._ids = np.concatenate([self._ids, np.zeros(extra, np.int32)])
            self._bias = np.concatenate([self._bias, np.zeros(extra, np.float32)])
            self._counts = np.concatenate([self._counts, np.zeros(extra, np.int32)])
            self._seen = np.concatenate([self._seen, np.zeros(extra, bool)])
        indices = [self._index[token] for token in tokens]
        self._ids[indices] = tokens
        return indices

    def _check_allowed(self) -> None:
        """A request whose allowed tokens are all banned would be answered with a token that it forbids."""
        if self._allowed is None:
            return
        usable = {token for token, entry in self._index.items() if self._bias[entry] != -math.inf}
        if not usable:
            raise RequestError(
                "Every token in allowed_token_ids is banned by logit_bias or bad_token_ids as well; "
                "allow one more token or drop a ban.",
                "allowed_token_ids",
            )
        if usable <= set(self._stops):
            raise RequestError(
                "min_tokens bans the end-of-sequence and stop tokens, and allowed_token_ids leaves no other; "
                "allow one more token or set min_tokens to 0.",
                "allowed_token_ids",
            )
