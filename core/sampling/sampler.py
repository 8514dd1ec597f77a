"""From logits to tokens, on the device: adjustments, temperature, filters, a draw, log-probabilities.

Written once against the array API. What a batch does not need is left out by its static `SamplerShape`, not by
a branch on values: a greedy batch is one arg-max.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..arrays import device_of, gather
from ..step import SamplerShape, SamplingInput, StepOutput

if TYPE_CHECKING:
    from ..ops import Ops  # which imports this package for the defaults of its sampling ops


def sample(ops: Ops, shape: SamplerShape, logits: Any, s: SamplingInput) -> StepOutput:
    """Chooses a token per row.

    Bias and bans, then penalties, then temperature, then top-k, top-p and min-p, then a draw (or the arg-max);
    a target replaces the choice. Log-probabilities are those of the given logits, before all of it. Logits that
    are NaN give some token of the vocabulary.

    Args:
        ops: the backend's operations.
        shape: what this batch needs, at most.
        logits: float [R, V].
        s: the rows' sampling fields.

    Returns:
        The tokens and, where asked for, their log-probabilities and ranks and the likeliest alternatives.
    """
    xp = ops.xp
    scores = _adjusted(ops, logits, s) if shape.adjust else logits
    tokens = ops.draw(shape, scores, s)
    tokens = xp.where(s.targets >= 0, s.targets, tokens)
    return _with_logprobs(ops, shape, logits, tokens)


def draw(ops: Ops, shape: SamplerShape, scores: Any, s: SamplingInput) -> Any:
    """The default of `Ops.draw`."""
    if not shape.greedy:
        scores = _perturbed(ops, shape, scores, s)
    return ops.xp.astype(ops.xp.argmax(scores, axis=-1), ops.xp.int32)


def _adjusted(ops: Ops, logits: Any, s: SamplingInput) -> Any:
    """Logits with biases, bans and penalties: gather the entries, change them, put them back.

    The repetition penalty follows CTRL (arXiv 1909.05858): positive logits are divided, others multiplied.
    """
    xp = ops.xp
    x = gather(xp, logits, xp.clip(s.adjust_ids, min=0)) + s.adjust_bias
    penalised = xp.where(x > 0, x / s.repetition[:, None], x * s.repetition[:, None])
    x = xp.where(s.adjust_seen, penalised, x)
    x = x - s.frequency[:, None] * xp.astype(s.adjust_counts, xp.float32)
    x = x - xp.where(s.adjust_counts > 0, s.presence[:, None], 0.0)
    others = xp.where(s.only_adjusted[:, None], -math.inf, logits)
    return ops.scatter(others, s.adjust_ids, xp.astype(x, logits.dtype))


def _perturbed(ops: Ops, shape: SamplerShape, logits: Any, s: SamplingInput) -> Any:
    """Scores whose arg-max is a draw from softmax(logits / temperature) over what the filters keep.

    Gumbel-max: adding Gumbel noise and taking the largest is a draw from the softmax, without normalising it.
    Greedy rows get no noise.
    """
    xp = ops.xp
    drawn = s.temperature[:, None] > 0
    # The largest logit becomes 0, so that a small temperature cannot make it overflow. Distinct logits stay
    # distinct from the largest, so a greedy row takes the same token as in a greedy batch.
    peak = xp.max(logits, axis=-1, keepdims=True)
    x = xp.astype(logits - xp.where(xp.isfinite(peak), peak, 0.0), xp.float32)
    x = x / xp.where(drawn, s.temperature[:, None], 1.0)
    scores = x + xp.where(drawn, ops.gumbel(s.seed, s.position, logits.shape[-1]), 0.0)
    if shape.filters:
        scores = xp.where(x >= ops.threshold(x, s.top_k, s.top_p, s.min_p), scores, -math.inf)
    return scores


def _with_logprobs(ops: Ops, shape: SamplerShape, logits: Any, tokens: Any) -> StepOutput:
    """The step's output: tokens int32 [R], and log-probabilities under softmax(logits) as far as asked for."""
    xp, device = ops.xp, device_of(logits)
    rows = tokens.shape[0] if shape.logprobs >= 0 else 0
    top_ids = xp.zeros((rows, 0), dtype=xp.int32, device=device)
    top_logprobs = xp.zeros((rows, 0), dtype=xp.float32, device=device)
    if shape.logprobs < 0:
        logprobs = xp.zeros((0,), dtype=xp.float32, device=device)
        ranks = xp.zeros((0,), dtype=xp.int32, device=device)
        return StepOutput(tokens, logprobs, ranks, top_ids, top_logprobs)
    peak = xp.max(logits, axis=-1, keepdims=True)
    log_sum = peak + xp.log(xp.sum(xp.exp(logits - peak), axis=-1, keepdims=True))
    chosen = gather(xp, logits, tokens[:, None])
    logprobs = xp.astype(chosen - log_sum, xp.float32)[:, 0]
    ranks = xp.sum(logits > chosen, axis=-1, dtype=xp.int32) + 1
    if shape.logprobs > 0:
        top, top_ids = ops.top_k(logits, shape.logprobs)
        top_logprobs = xp.astype(top - log_sum, xp.float32)
    return StepOutput(tokens, logprobs, ranks, top_ids, top_logprobs)
