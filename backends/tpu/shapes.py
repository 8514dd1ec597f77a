"""Which shapes programs are made for. Each costs seconds of compilation on a TPU, so there are few."""

from __future__ import annotations

from ...core.backend import Buckets, StepConstraints, StepLimits
from ...core.models.spec import ModelSpec
from ...core.sampling.params import MAX_LOGPROBS
from ...core.step import SamplerShape

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
