"""The inputs and outputs of one decoding step: plain arrays with padded shapes, and the static shape itself.

Everything that varies from step to step is data in `StepInput`; everything a compiler has to know is in
`StepShape`. Both are NamedTuples, so JAX takes a `StepInput` as a pytree and torch's tracer takes it whole.

Letters in shapes: T tokens, S sequences, B blocks per sequence, R rows of logits, A adjusted tokens per row,
N alternatives with log-probabilities, V vocabulary. Arrays are NumPy on the host and the backend's own
kind inside the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class SamplerShape(NamedTuple):
    """What the sampler has to do in a step, at most. Static: a compiled program is made for one of these.

    Attributes:
        greedy: every row takes its likeliest token; no random number is drawn.
        filters: some row uses top-k, top-p or min-p.
        adjust: A, the entries per row of penalties, biases and bans; 0 is none.
        logprobs: N, the alternatives per row whose log-probability is wanted; -1 is none at all, 0 is the
            chosen token's only.
    """

    greedy: bool = True
    filters: bool = False
    adjust: int = 0
    logprobs: int = -1

    def covers(self, other: SamplerShape) -> bool:
        """Whether a program made for this shape can do the work of the other."""
        return (
            (other.greedy or not self.greedy)
            and (self.filters or not other.filters)
            and self.adjust >= other.adjust
            and self.logprobs >= other.logprobs
        )


class StepShape(NamedTuple):
    """The static shape of a step.

    Attributes:
        tokens: T.
        sequences: S.
        blocks: B.
        rows: R.
        decode: every sequence has exactly one token in this step (then T = S, and row i belongs to token i).
        sampler: what the sampler has to do.
    """

    tokens: int
    sequences: int
    blocks: int
    rows: int
    decode: bool
    sampler: SamplerShape = SamplerShape()


class SamplingInput(NamedTuple):
    """How to turn row r of the logits into a token. All arrays are row-wise; padded rows are greedy.

    Attributes:
        out_slots: int32 [R]; where in `Cache.sampled` the token is kept for the next step. Rows whose token is
            not used point to the last entry.
        targets: int32 [R]; -1 samples; otherwise this token is "chosen" (prompt log-probabilities).
        temperature: float32 [R]; 0 is greedy.
        top_k: int32 [R]; 0 is off.
        top_p: float32 [R]; 1 is off.
        min_p: float32 [R]; 0 is off.
        seed: int32 [R, 2]; the low and the high 32 bits of the request's seed.
        position: int32 [R]; the counter of the random draw: the position in the sequence that is drawn.
        repetition, presence, frequency: float32 [R]; penalties (1, 0, 0 are off).
        adjust_ids: int32 [R, A]; token ids, each at most once in a row; -1 is an unused entry.
        adjust_bias: float32 [R, A]; added to the logit; -inf bans the token.
        adjust_counts: int32 [R, A]; how often the output has the token.
        adjust_seen: bool [R, A]; whether prompt or output have it (repetition penalty).
        only_adjusted: bool [R]; tokens without an entry in this row are banned (allowed_token_ids).
    """

    out_slots: Any
    targets: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    position: Any
    repetition: Any
    presence: Any
    frequency: Any
    adjust_ids: Any
    adjust_bias: Any
    adjust_counts: Any
    adjust_seen: Any
    only_adjusted: Any


class StepInput(NamedTuple):
    """One step over a ragged batch: sequences one after another, each with its next tokens.

    Attributes:
        token_ids: int32 [T]; a negative entry -1 - s stands for the token last sampled into `Cache.sampled[s]`,
            so a step can be launched before its tokens have reached the host.
        positions: int32 [T]; position of the token in its sequence, from 0.
        slot_mapping: int32 [T]; where the token's key and value go: block * block_size + offset. Padded tokens
            go to block 0, the null block, which is never read.
        query_start: int32 [S + 1]; sequence s has tokens query_start[s] to query_start[s + 1]; padded
            sequences have none.
        seq_lens: int32 [S]; tokens in the sequence including this step's; 0 for padded sequences.
        block_tables: int32 [S, B]; the blocks of each sequence in order, then 0. A block that a sliding window
            has left is 0 as well.
        logits_rows: int32 [R]; the token whose logits make row r. Padded rows point to token 0.
        sampling: how the rows become tokens.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    query_start: Any
    seq_lens: Any
    block_tables: Any
    logits_rows: Any
    sampling: SamplingInput


class StepOutput(NamedTuple):
    """What a step gives back.

    Attributes:
        tokens: int32 [R]; the sampled (or target) tokens.
        logprobs: float32 [R]; natural log-probability of that token; [0] when not asked for.
        ranks: int32 [R]; how many tokens are likelier, plus 1; [0] when not asked for.
        top_ids: int32 [R, N]; the N likeliest tokens, likeliest first; [0, 0] when not asked for.
        top_logprobs: float32 [R, N]; their log-probabilities.
    """

    tokens: Any
    logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any


class Cache(NamedTuple):
    """All device state that a step changes. A step returns it; it is never changed behind the core's back.

    Attributes:
        layers: the paged KV cache, in the backend's own layout; a list with one entry per layer unless the backend
            overrides `Ops.layer_cache` and `Ops.with_layer_cache`.
        sampled: int32 [max_num_seqs + 1]; the token last sampled for each running sequence; the last entry is
            for rows whose token nobody wants.
    """

    layers: Any
    sampled: Any


@dataclass(frozen=True)
class Step:
    """What the core hands to `Backend.submit`.

    Attributes:
        shape: the static shape; one of the backend's declared buckets where it declares any.
        inputs: the arrays (NumPy, int32/float32/bool as documented), padded to the shape.
    """

    shape: StepShape
    inputs: StepInput


def map_arrays(function: Any, value: Any) -> Any:
    """Applies a function to each array of a StepInput, SamplingInput or StepOutput."""
    if isinstance(value, tuple):
        return type(value)(*(map_arrays(function, v) for v in value))
    return function(value)


def dummy_step(shape: StepShape, max_num_seqs: int, longest: int) -> Step:
    """A step of the given shape that touches only the null block: for warm-up and profiling.

    Args:
        shape: its shape.
        max_num_seqs: the engine's.
        longest: tokens that a sequence may have, by the context length and by the shape's block tables.
    """
    T, S, B, R, A = shape.tokens, shape.sequences, shape.blocks, shape.rows, shape.sampler.adjust
    ints = lambda *dims: np.zeros(dims, np.int32)  # noqa: E731
    floats = lambda fill, *dims: np.full(dims, fill, np.float32)  # noqa: E731
    # Tokens are spread over the sequences as far as those may grow; the rest are padding.
    lens = np.asarray([min(longest, T // S + (s < T % S)) for s in range(S)], np.int32)
    positions = np.zeros(T, np.int32)
    positions[: lens.sum()] = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    sampling = SamplingInput(
        out_slots=np.full(R, max_num_seqs, np.int32),
        targets=np.full(R, -1, np.int32),
        temperature=floats(0.0 if shape.sampler.greedy else 1.0, R),
        top_k=ints(R),
        top_p=floats(1.0, R),
        min_p=floats(0.0, R),
        seed=ints(R, 2),
        position=ints(R),
        repetition=floats(1.0, R),
        presence=floats(0.0, R),
        frequency=floats(0.0, R),
        adjust_ids=np.full((R, A), -1, np.int32),
        adjust_bias=floats(0.0, R, A),
        adjust_counts=ints(R, A),
        adjust_seen=np.zeros((R, A), bool),
        only_adjusted=np.zeros(R, bool),
    )
    inputs = StepInput(
        token_ids=ints(T),
        positions=positions,
        slot_mapping=ints(T),
        query_start=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        seq_lens=lens,
        block_tables=ints(S, B),
        logits_rows=ints(R),
        sampling=sampling,
    )
    return Step(shape, inputs)
