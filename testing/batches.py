"""Ragged batches over a randomly scattered paged cache, as the engine would build them: pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.backend import Buckets, StepConstraints
from ..core.step import SamplerShape, Step, StepInput, StepShape, dummy_step


@dataclass
class Pool:
    """Hands out KV blocks in random order. Block 0, the null block, is never handed out."""

    num_blocks: int
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = (np.random.default_rng(self.seed).permutation(self.num_blocks - 1) + 1).tolist()

    def take(self, count: int) -> list[int]:
        """`count` blocks."""
        assert count <= len(self.free), "the test's pool is too small"
        return [self.free.pop() for _ in range(count)]


@dataclass
class Stream:
    """One sequence and its blocks.

    Attributes:
        slot: its entry in `Cache.sampled`.
        length: tokens that are in the cache already.
    """

    slot: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)

    def reserve(self, length: int, block_size: int, pool: Pool) -> None:
        """Takes the blocks that so many tokens need."""
        self.blocks += pool.take(-(-length // block_size) - len(self.blocks))

    def slots(self, low: int, high: int, block_size: int) -> np.ndarray:
        """Where the keys of positions low to high - 1 are: int32."""
        positions = np.arange(low, high)
        return (np.asarray(self.blocks)[positions // block_size] * block_size + positions % block_size).astype(np.int32)


@dataclass(frozen=True)
class Part:
    """What a step does for one sequence.

    Attributes:
        tokens: the next tokens; negative ones refer to `Cache.sampled`.
    """

    sequence: Stream
    tokens: Sequence[int]


def bucket(size: int, sizes: Sequence[int] | None) -> int:
    """The declared size that holds `size`."""
    return size if sizes is None else min(s for s in sizes if s >= size)


def step_shape(
    parts: Sequence[Part], block_size: int, constraints: StepConstraints, sampler: SamplerShape = SamplerShape()
) -> StepShape:
    """The least declared shape for a step; one row of logits for each sequence."""
    decode = all(len(p.tokens) == 1 for p in parts)
    sizes: Buckets = constraints.decode if decode else constraints.prefill
    longest = max(p.sequence.length + len(p.tokens) for p in parts)
    sequences = bucket(len(parts), sizes.sequences)
    tokens = sequences if decode else bucket(sum(len(p.tokens) for p in parts), sizes.tokens)
    if constraints.samplers is not None:
        sampler = next(s for s in constraints.samplers if s.covers(sampler))
    return StepShape(tokens, sequences, bucket(-(-longest // block_size), sizes.blocks), sequences, decode, sampler)


def build_step(parts: Sequence[Part], shape: StepShape, block_size: int, max_num_seqs: int) -> Step:
    """The step, greedy, with the last token of each part giving a row. Lengths are not advanced."""
    empty = dummy_step(shape, max_num_seqs, block_size).inputs
    token_ids, positions = np.zeros(shape.tokens, np.int32), np.zeros(shape.tokens, np.int32)
    slot_mapping, seq_lens = np.zeros(shape.tokens, np.int32), np.zeros(shape.sequences, np.int32)
    query_start = np.zeros(shape.sequences + 1, np.int32)
    block_tables = np.zeros((shape.sequences, shape.blocks), np.int32)
    logits_rows, out_slots = np.zeros(shape.rows, np.int32), np.full(shape.rows, max_num_seqs, np.int32)
    at = 0
    for s, part in enumerate(parts):
        sequence, count = part.sequence, len(part.tokens)
        low, high = sequence.length, sequence.length + count
        token_ids[at : at + count] = part.tokens
        positions[at : at + count] = np.arange(low, high)
        slot_mapping[at : at + count] = sequence.slots(low, high, block_size)
        seq_lens[s] = high
        used = -(-high // block_size)
        block_tables[s, :used] = sequence.blocks[:used]
        at += count
        query_start[s + 1 :] = at
        logits_rows[s], out_slots[s] = at - 1, sequence.slot
    inputs = StepInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_rows=logits_rows,
        sampling=empty.sampling._replace(out_slots=out_slots, temperature=np.zeros(shape.rows, np.float32)),
    )
    return Step(shape, inputs)
