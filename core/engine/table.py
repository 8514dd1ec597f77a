"""The running sequences as arrays, one row ("slot") each, so that a step of decodes is built without a Python loop."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..backend import StepLimits
from ..sampling.rng import split_seed
from .sequence import Sequence

_STOP_WIDTH = 4  # stop tokens per row to begin with; a sequence with more widens the array


class RunningTable:
    """Arrays over slots. A slot is also the sequence's entry in `Cache.sampled`.

    Attributes:
        length: int64; tokens of the sequence, including one that is sampled but not yet collected.
        computed: int64; tokens whose KV was computed by the steps submitted so far.
        pending: int64; sampled tokens that are not yet collected, 0 or 1 (or more with deeper pipelines).
        last_token: int32; the last token known on the host.
        block_table: int32 [slots, max_blocks]; the blocks in order.
        num_blocks: int64; how many of them.
        check_copy: bool; the tail block may be shared, so it must be checked before it is written.
        limit: int64; most tokens.
        stop_from: int64; length from which a stop token ends the sequence (min_tokens).
        first_length: int64; length with the first output token.
        stop_ids: int32 [slots, n]; end-of-sequence and stop tokens, -1 where there are fewer.
        history: bool; a step needs the previous token on the host (penalties, bad words).
        adjust: bool; the row has penalties, biases or bans.
        others: sampling fields by name, as `SamplingInput` has them.
    """

    def __init__(self, limits: StepLimits) -> None:
        n = limits.max_num_seqs
        self.size = n
        self.sequences: list[Sequence | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.length = np.zeros(n, np.int64)
        self.computed = np.zeros(n, np.int64)
        self.pending = np.zeros(n, np.int64)
        self.last_token = np.zeros(n, np.int32)
        self.block_table = np.zeros((n, limits.max_blocks), np.int32)
        self.num_blocks = np.zeros(n, np.int64)
        self.check_copy = np.zeros(n, bool)
        self.limit = np.zeros(n, np.int64)
        self.stop_from = np.zeros(n, np.int64)
        self.first_length = np.zeros(n, np.int64)
        self.stop_ids = np.full((n, _STOP_WIDTH), -1, np.int32)
        self.history = np.zeros(n, bool)
        self.adjust = np.zeros(n, bool)
        self.temperature = np.zeros(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.seed = np.zeros((n, 2), np.int32)
        self.repetition = np.ones(n, np.float32)
        self.presence = np.zeros(n, np.float32)
        self.frequency = np.zeros(n, np.float32)
        self.filtered = np.zeros(n, bool)
        self.logprobs = np.full(n, -1, np.int32)

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def add(self, seq: Sequence, computed: int, eos_token_ids: Collection[int]) -> int:
        """Gives the sequence a slot and fills its row; its blocks are those it holds now."""
        slot = self._free.pop()
        params = seq.request.params
        self.sequences[slot] = seq
        seq.slot = slot
        self.length[slot] = len(seq.tokens)
        self.computed[slot] = computed
        self.pending[slot] = 0
        self.last_token[slot] = seq.tokens[-1]
        self.set_blocks(seq)
        self.check_copy[slot] = False
        self.limit[slot] = seq.limit
        self.stop_from[slot] = seq.num_prompt + params.min_tokens
        self.first_length[slot] = seq.num_prompt + 1
        self._set_stops(slot, set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids)))
        self.history[slot] = params.needs_history
        self.adjust[slot] = seq.adjustments is not None
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = split_seed(seq.seed)
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.filtered[slot] = not params.greedy and bool(params.top_k or params.top_p < 1.0 or params.min_p)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        return slot

    def remove(self, seq: Sequence) -> None:
        """Takes the slot back."""
        self.sequences[seq.slot] = None
        self._free.append(seq.slot)
        seq.slot = -1

    def set_blocks(self, seq: Sequence) -> None:
        """Copies the sequence's list of blocks into its row."""
        self.num_blocks[seq.slot] = len(seq.blocks)
        self.block_table[seq.slot, : len(seq.blocks)] = seq.blocks

    def _set_stops(self, slot: int, stops: set[int]) -> None:
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((self.size, len(stops) - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = list(stops)
