"""The forward pass of a decoder, written once, for every backend. Pure: what it changes, it returns."""

from __future__ import annotations

from typing import Any

from ..arrays import device_of
from ..ops import Ops, StepContext
from ..sampling.sampler import sample
from ..step import Cache, SamplerShape, SamplingInput, StepInput, StepOutput, StepShape
from .spec import ModelSpec


def forward(
    model: ModelSpec, ops: Ops, shape: StepShape, params: Any, cache: Cache, inputs: StepInput
) -> tuple[Cache, Any]:
    """Runs the batch through the model. Returns the cache and the logits, [R, V] in `ops.wide`."""
    xp = ops.xp
    ids = inputs.token_ids
    ids = xp.where(ids < 0, xp.take(cache.sampled, xp.clip(-1 - ids, min=0), axis=0), ids)
    cos, sin = ops.rotary_table(params["rope_inv_freq"], inputs.positions, model.rope.attention_factor)
    local = ops.local_model(model)
    ctx = StepContext(local, shape, inputs, ops.plan(local, shape, inputs, cache), cos, sin)

    x = ops.embed(params["embed"], ids)
    x, layers = ops.decoder(x, params["layers"], cache.layers, ctx)
    rows = ops.rms_norm(xp.take(x, inputs.logits_rows, axis=0), params["norm"], model.norm_eps)
    logits = ops.logits(rows, params["embed"] if model.tie_embeddings else params["lm_head"])
    return cache._replace(layers=layers), logits[:, : model.vocab_size]


def step(
    model: ModelSpec, ops: Ops, shape: StepShape, params: Any, cache: Cache, inputs: StepInput
) -> tuple[Cache, StepOutput]:
    """One decoding step: the forward pass, then the sampler, which also keeps the tokens for the next step."""
    cache, logits = forward(model, ops, shape, params, cache, inputs)
    sampled, output = choose(ops, shape.sampler, logits, cache.sampled, inputs.sampling)
    return cache._replace(sampled=sampled), output


def choose(ops: Ops, shape: SamplerShape, logits: Any, sampled: Any, sampling: SamplingInput) -> tuple[Any, StepOutput]:
    """The second half of a step: from logits [R, V] to tokens, and `Cache.sampled` with them in it.

    A backend may compile the halves apart: as many forward passes plus samplers, not their product.
    """
    output = sample(ops, shape, logits, sampling)
    return _keep(ops, sampled, sampling.out_slots, output.tokens), output


def _keep(ops: Ops, sampled: Any, out_slots: Any, tokens: Any) -> Any:
    """sampled with tokens[r] at out_slots[r], without a scatter: slots are few and, but for the last, distinct."""
    xp = ops.xp
    hit = out_slots[:, None] == xp.arange(sampled.shape[0], dtype=xp.int32, device=device_of(sampled))[None, :]
    values = xp.sum(xp.where(hit, tokens[:, None], 0), axis=0, dtype=xp.int32)
    return xp.where(xp.any(hit, axis=0), values, sampled)
