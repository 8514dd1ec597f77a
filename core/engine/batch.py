"""From what the scheduler picked to the arrays of a step, padded to the backend's buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..backend import StepConstraints, StepLimits
from ..errors import OctavoError
from ..step import SamplerShape, SamplingInput, Step, StepInput, StepShape
from .sequence import Sequence
from .table import RunningTable


class Transfer(NamedTuple):
    """Blocks to move before the step, in the order in which the scheduler decided it.

    Attributes:
        kind: "copy" (device to device), "out" (device to host) or "in" (host to device).
        source, target: block numbers.
    """

    kind: str
    source: list[int]
    target: list[int]


class Chunk(NamedTuple):
    """A piece of a prompt.

    Attributes:
        seq: the sequence.
        slot: its slot.
        start, length: positions start to start + length of its tokens.
        samples: whether it ends the prompt, so a token is sampled.
        prompt_logprobs: whether log-probabilities of the prompt's tokens are wanted.
    """

    seq: Sequence
    slot: int
    start: int
    length: int
    samples: bool
    prompt_logprobs: bool


@dataclass
class Batch:
    """What runs in a step.

    Attributes:
        num_tokens: tokens in all.
        decode_slots: int64 [n]; slots of the decoding sequences, which come first in the batch.
        decode_tokens: int32 [n]; their tokens, or -1 - slot where the host does not know it yet.
        decode_positions: int64 [n]; positions of those tokens.
        decode_seqs: the sequences.
        chunks: pieces of prompts, after the decodes.
        transfers: blocks to move before.
        row_slots: int64 [rows]; the sampling rows' slots: decodes, then the chunks that sample.
        row_seqs: their sequences.
        row_positions: int64 [rows]; positions of the tokens whose logits are sampled.
        target_rows: per chunk with prompt log-probabilities: (sequence, row of its first one, how many).
    """

    num_tokens: int = 0
    decode_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    decode_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    decode_positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    decode_seqs: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    row_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    row_seqs: list[Sequence] = field(default_factory=list)
    row_positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    target_rows: list[tuple[Sequence, int, int]] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        """Decoding sequences."""
        return len(self.decode_slots)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step."""
        return self.decode_seqs + [c.seq for c in self.chunks]

    def set_decodes(self, table: RunningTable, slots: np.ndarray) -> None:
        """Takes the decoding sequences as they stand now, before the table counts this step."""
        self.decode_slots = slots
        self.decode_tokens = np.where(table.pending[slots] > 0, -1 - slots, table.last_token[slots]).astype(np.int32)
        self.decode_positions = table.computed[slots]
        sequences = table.sequences
        self.decode_seqs = [sequences[s] for s in slots.tolist()]
        self.num_tokens += len(slots)


class BatchBuilder:
    """Makes steps of batches.

    Args:
        limits: bounds of the engine.
        constraints: the backend's buckets.
        table: the running sequences.
    """

    def __init__(self, limits: StepLimits, constraints: StepConstraints, table: RunningTable) -> None:
        self._limits = limits
        self._constraints = constraints
        self._table = table

    def build(self, batch: Batch) -> Step:
        """Fills the batch's row bookkeeping and returns the step to submit."""
        t, size = self._table, self._limits.block_size
        chunks, n = batch.chunks, batch.num_decodes
        counts = np.ones(n + len(chunks), np.int64)
        slots, positions, tokens = batch.decode_slots, batch.decode_positions, batch.decode_tokens
        lens = positions + 1
        token_slots = slots
        if chunks:
            counts[n:] = [c.length for c in chunks]
            slots = np.concatenate([slots, [c.slot for c in chunks]])
            lens = np.concatenate([lens, [c.start + c.length for c in chunks]])
            positions = np.concatenate([positions, *(np.arange(c.start, c.start + c.length) for c in chunks)])
            pieces = (np.asarray(c.seq.tokens[c.start : c.start + c.length], np.int32) for c in chunks)
            tokens = np.concatenate([tokens, *pieces])
            token_slots = np.repeat(slots, counts)
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        row_tokens, row_slots, targets = self._rows(batch, starts)

        decode = batch.num_tokens == len(counts)
        used_blocks = -(-int(lens.max()) // size)
        sizes = self._constraints.decode if decode else self._constraints.prefill
        # Where shapes are fixed there is one row per sequence, so many rows need many (padded) sequences.
        S = _bucket(len(counts) if sizes.sequences is None else max(len(counts), len(row_tokens)), sizes.sequences)
        T = S if decode else _bucket(batch.num_tokens, sizes.tokens)
        B = _bucket(used_blocks, sizes.blocks)
        R = S if sizes.sequences is not None else max(1, len(row_tokens))
        sampling, sampler = self._sampling(batch, row_slots, targets, R)
        inputs = StepInput(
            token_ids=_pad(tokens, T, 0),
            positions=_pad(positions, T, 0),
            slot_mapping=_pad(t.block_table[token_slots, positions // size] * size + positions % size, T, 0),
            query_start=_pad(starts, S + 1, batch.num_tokens),
            seq_lens=_pad(lens, S, 0),
            block_tables=self._block_tables(slots, S, B, used_blocks),
            logits_rows=_pad(row_tokens, R, 0),
            sampling=sampling,
        )
        return Step(StepShape(T, S, B, R, decode, sampler), inputs)

    def _rows(self, batch: Batch, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which tokens get logits: int64 [rows] tokens, slots and targets (-1 samples); sampling rows come first."""
        n = batch.num_decodes
        sampling = [(i, c) for i, c in enumerate(batch.chunks) if c.samples]
        batch.row_slots, batch.row_seqs, batch.row_positions = (
            batch.decode_slots,
            batch.decode_seqs,
            batch.decode_positions,
        )
        if sampling:
            batch.row_slots = np.concatenate([batch.row_slots, [c.slot for _, c in sampling]])
            batch.row_seqs = batch.row_seqs + [c.seq for _, c in sampling]
            ends = [c.start + c.length - 1 for _, c in sampling]
            batch.row_positions = np.concatenate([batch.row_positions, ends])
        tokens = np.concatenate([starts[:n], [starts[n + i + 1] - 1 for i, _ in sampling]]).astype(np.int64)
        slots, targets = batch.row_slots, np.full(len(tokens), -1, np.int64)
        for i, chunk in enumerate(batch.chunks):
            if chunk.prompt_logprobs and chunk.seq.prompt_logprobs is not None:
                first = max(chunk.start, len(chunk.seq.prompt_logprobs))
                last = min(chunk.start + chunk.length, chunk.seq.num_prompt - 1)
                if last > first:
                    batch.target_rows.append((chunk.seq, len(tokens), last - first))
                    at = starts[n + i] + np.arange(first, last) - chunk.start
                    tokens = np.concatenate([tokens, at])
                    slots = np.concatenate([slots, np.full(last - first, chunk.slot)])
                    targets = np.concatenate([targets, chunk.seq.tokens[first + 1 : last + 1]])
        return tokens, slots, targets

    def _sampling(
        self, batch: Batch, slots: np.ndarray, targets: np.ndarray, R: int
    ) -> tuple[SamplingInput, SamplerShape]:
        t = self._table
        sampled = len(batch.row_seqs)
        own = batch.row_slots
        temperature = t.temperature[slots]
        temperature[sampled:] = 0.0
        entries = self._adjust_entries(batch) if t.adjust[own].any() else []
        logprobs = int(t.logprobs[own].max(initial=-1))
        for seq, _, _ in batch.target_rows:
            logprobs = max(logprobs, seq.request.params.prompt_logprobs or 0)
        needed = SamplerShape(
            greedy=not temperature.any(),
            filters=bool(t.filtered[own].any()),
            adjust=max((len(e[0]) for _, e, _ in entries), default=0),
            logprobs=logprobs,
        )
        shape = self._sampler(needed)
        A = shape.adjust
        adjust_ids = np.full((R, A), -1, np.int32)
        adjust_bias = np.zeros((R, A), np.float32)
        adjust_counts = np.zeros((R, A), np.int32)
        adjust_seen = np.zeros((R, A), bool)
        only_adjusted = np.zeros(R, bool)
        for row, (ids, bias, counts, seen), only in entries:
            width = len(ids)
            adjust_ids[row, :width], adjust_bias[row, :width] = ids, bias
            adjust_counts[row, :width], adjust_seen[row, :width] = counts, seen
            only_adjusted[row] = only
        out_slots = np.full(R, t.size, np.int32)
        out_slots[:sampled] = own
        position = np.zeros(R, np.int32)
        position[:sampled] = batch.row_positions + 1
        inputs = SamplingInput(
            out_slots=out_slots,
            targets=_pad(targets, R, -1),
            temperature=_pad(temperature, R, 0.0, np.float32),
            top_k=_pad(t.top_k[slots], R, 0),
            top_p=_pad(t.top_p[slots], R, 1.0, np.float32),
            min_p=_pad(t.min_p[slots], R, 0.0, np.float32),
            seed=_pad(t.seed[slots], R, 0),
            position=position,
            repetition=_pad(t.repetition[slots], R, 1.0, np.float32),
            presence=_pad(t.presence[slots], R, 0.0, np.float32),
            frequency=_pad(t.frequency[slots], R, 0.0, np.float32),
            adjust_ids=adjust_ids,
            adjust_bias=adjust_bias,
            adjust_counts=adjust_counts,
            adjust_seen=adjust_seen,
            only_adjusted=only_adjusted,
        )
        return inputs, shape

    def _adjust_entries(self, batch: Batch) -> list[tuple[int, tuple, bool]]:
        out = []
        for row in np.flatnonzero(self._table.adjust[batch.row_slots]).tolist():
            seq = batch.row_seqs[row]
            assert seq.adjustments is not None
            num_output = int(batch.row_positions[row]) + 1 - seq.num_prompt
            out.append((row, seq.adjustments.entries(num_output), seq.adjustments.only_adjusted))
        return out

    def _sampler(self, needed: SamplerShape) -> SamplerShape:
        allowed = self._constraints.samplers
        if allowed is None:
            return needed
        for shape in allowed:
            if shape.covers(needed):
                return shape
        raise OctavoError(f"no sampler of the device covers {needed}: a request was admitted that should not have been")

    def _block_tables(self, slots: np.ndarray, S: int, B: int, used: int) -> np.ndarray:
        table = np.zeros((S, B), np.int32)
        table[: len(slots), :used] = self._table.block_table[slots, :used]
        return table


def _bucket(size: int, buckets: tuple[int, ...] | None) -> int:
    """The least bucket that holds size. The scheduler stays within the largest."""
    return size if buckets is None else buckets[bisect_left(buckets, size)]


def _pad(values: np.ndarray, size: int, fill: float, dtype: type = np.int32) -> np.ndarray:
    if len(values) == size:
        return values.astype(dtype)
    out = np.full((size, *values.shape[1:]), fill, dtype)
    out[: len(values)] = values
    return out
