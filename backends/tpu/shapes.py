"""Which shapes programs are made for. Each costs seconds of compilation on a TPU, so there are few."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ...core.backend import Buckets, StepConstraints, StepLimits
from ...core.errors import ConfigError, ContextTooLongError
from ...core.models.spec import ModelSpec
from ...core.sampling.params import MAX_LOGPROBS
from ...core.step import SamplerShape
from .work import SCALAR_MEMORY, scalar_bytes

LEAST_TOKENS = 16
LEAST_SEQUENCES = 8
LEAST_BLOCKS = 32


def ladder(least: int, most: int, factor: int) -> tuple[int, ...]:
    """least, least × factor, …, up to the first power of two (times least) that holds `most`."""
    top = least
    while top < most:
        top *= 2
    rungs = [least]
    while rungs[-1] < top:
        rungs.append(min(rungs[-1] * factor, top))
    return tuple(rungs)


def step_constraints(model: ModelSpec, limits: StepLimits) -> StepConstraints:
    """Tokens and decoding sequences by powers of two: padding costs at most half of a step.

    Block tables only have to be transferred (attention stops at the longest sequence), and the sequences of a prompt
    step only cost their logits, so those ladders are sparse.
    """
    blocks = ladder(LEAST_BLOCKS, limits.max_blocks, 16)
    return StepConstraints(
        decode=Buckets(sequences=ladder(LEAST_SEQUENCES, limits.max_num_seqs, 2), blocks=blocks),
        prefill=Buckets(
            tokens=ladder(LEAST_TOKENS, limits.max_num_batched_tokens, 2),
            sequences=ladder(LEAST_SEQUENCES, limits.max_num_seqs, 8),
            blocks=blocks,
        ),
        mixed=True,
        samplers=_samplers(model, limits),
        max_in_flight=2,
    )


def check_scalar_memory(constraints: StepConstraints, limits: StepLimits) -> None:
    """The attention kernel reads block tables from a chip's scalar memory, which is small.

    Raises:
        ConfigError: the largest tables exceed it; with what would fit.
    """
    shapes = constraints.shapes()

    def needed(blocks: float = math.inf, sequences: float = math.inf) -> int:
        fits = [s for s in shapes if s.blocks <= blocks and s.sequences <= sequences]
        return max((scalar_bytes(s.sequences, s.blocks, s.tokens) for s in fits), default=0)

    def needed_with(other: StepLimits) -> int:
        blocks = ladder(LEAST_BLOCKS, other.max_blocks, 16)[-1]
        return max(scalar_bytes(s.sequences, blocks, s.tokens) for s in shapes)

    if needed() <= SCALAR_MEMORY:
        return
    lengths = [b * limits.block_size for b in constraints.decode.blocks or () if needed(blocks=b) <= SCALAR_MEMORY]
    counts = [n for n in constraints.decode.sequences or () if needed(sequences=n) <= SCALAR_MEMORY]
    # Only what is enough by itself.
    advice = [f"--max-model-len {lengths[-1]}"] if lengths else []
    advice += [f"--max-num-seqs {counts[-1]}"] if counts else []
    sizes = [b for b in (32, 64, 128) if b > limits.block_size]
    sizes = [b for b in sizes if needed_with(replace(limits, block_size=b)) <= SCALAR_MEMORY]
    advice += [f"--block-size {sizes[0]}"] if sizes else []
    kind = partial(ContextTooLongError, max_model_len=lengths[-1]) if lengths else ConfigError
    raise kind(
        f"Block tables for --max-num-seqs {limits.max_num_seqs} sequences of --max-model-len {limits.max_model_len} "
        f"tokens take {needed()} bytes of a TPU's scalar memory, and {SCALAR_MEMORY} are there. Lower one of them or "
        f"use larger blocks: {' or '.join(advice)} would do."
    )


def _samplers(model: ModelSpec, limits: StepLimits) -> tuple[SamplerShape, ...]:
    """Greedy; drawing; with log-probabilities; and with an entry for each token that a sequence may have."""
    logprobs = min(MAX_LOGPROBS, model.vocab_size)
    entries = min(model.vocab_size, ladder(64, limits.max_model_len, 2)[-1])
    return (
        SamplerShape(),
        SamplerShape(greedy=False, filters=True),
        SamplerShape(greedy=False, filters=True, logprobs=logprobs),
        SamplerShape(greedy=False, filters=True, adjust=entries, logprobs=logprobs),
    )
