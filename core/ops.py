"""The operations of the forward pass. A backend brings two; the others have defaults made of its `xp`.

`decoder.py` writes the forward pass in terms of these. The composites (`decoder`, `attention_block`, `mlp_block`) can
be overridden as well, so a device with a fused kernel for half a layer replaces half a layer.

Letters in shapes: T tokens, H query heads, K key/value heads, D head width, E hidden width, F MLP width,
R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import device_of
from .models.spec import ModelSpec
from .sampling import filters, rng, sampler
from .step import Cache, SamplerShape, SamplingInput, StepInput, StepShape

Body = Callable[[Any, Any, Any, int], tuple[Any, Any]]


class StepContext(NamedTuple):
    """What every op of a step may need.

    Attributes:
        model: the model as it is computed, see `Ops.local_model`.
        shape: the step's static shape.
        inputs: the step's arrays, on the device.
        plan: what `Ops.plan` made for this step.
        cos, sin: float32 [T, D / 2]; the rotary embedding of each token's position.
    """

    model: ModelSpec
    shape: StepShape
    inputs: StepInput
    plan: Any
    cos: Any
    sin: Any


class Ops(ABC):
    """Operations over the arrays of one namespace.

    Attributes:
        xp: the array namespace.
        wide: the dtype for norms, softmax and logits (float32; the oracle uses float64).
    """

    def __init__(self, xp: Any, wide: Any = None) -> None:
        self.xp = xp
        self.wide = wide if wide is not None else xp.float32

    # ------------------------------------------------------------------ mandatory: the paged cache

    @abstractmethod
    def write_cache(self, cache: Any, k: Any, v: Any, ctx: StepContext) -> Any:
        """Writes keys and values [T, K, D] of this step's tokens at `ctx.inputs.slot_mapping`.

        Args:
            cache: one layer's cache.

        Returns:
            The layer's cache with them in it: the same object where arrays can be changed in place.
        """

    @abstractmethod
    def attention(self, q: Any, k: Any, v: Any, cache: Any, ctx: StepContext, window: int | None) -> Any:
        """Causal attention of this step's tokens to their sequences.

        Token t of sequence s at position p attends to positions 0 to p of s (the last `window` of them, itself
        included, where there is a window). Scores are multiplied with `ctx.model.scale`.

        Args:
            q: [T, H, D]; query head h reads key/value head h // (H / K).
            k, v: [T, K, D]; this step's keys and values. They are in the cache already; a backend may read
                them from either place.
            cache: one layer's cache, this step's keys and values included.
            window: tokens of the sliding window, or None.

        Returns:
            [T, H, D] in q's dtype. Padded tokens have any finite value.
        """

    # ------------------------------------------------------------------ the model as it is computed

    def local_model(self, model: ModelSpec) -> ModelSpec:
        """The model whose heads these ops see. Default: the model itself.

        A backend that spreads a model over devices may have more heads (padded until they divide) or fewer (one
        process's share) than the model has. `load` has shaped the parameters for it. Logits beyond the model's
        vocabulary are cut off by the forward pass. Applied to its own result it changes nothing.
        """
        return model

    # ------------------------------------------------------------------ per step

    def plan(self, model: ModelSpec, shape: StepShape, inputs: StepInput, cache: Cache) -> Any:
        """What attention and cache writes can share between the layers of a step. Default: nothing."""
        return None

    def rotary_table(self, inv_freq: Any, positions: Any, factor: float) -> tuple[Any, Any]:
        """cos and sin of position × frequency, times the factor: float32 [D / 2], int32 [T] → float32 [T, D / 2]."""
        xp = self.xp
        angles = xp.astype(positions, self.wide)[:, None] * xp.astype(inv_freq, self.wide)[None, :]
        return xp.cos(angles) * factor, xp.sin(angles) * factor

    def layers(self, body: Body, x: Any, params: Any, caches: Any) -> tuple[Any, Any]:
        """Applies body(x, layer's params, layer's cache, layer's index) → (x, cache) layer after layer.

        Default: a Python loop. A compiler's loop over stacked layers goes here.
        """
        for index, layer in enumerate(params):
            x, cache = body(x, layer, self.layer_cache(caches, index), index)
            caches = self.with_layer_cache(caches, index, cache)
        return x, caches

    def layer_cache(self, caches: Any, index: int) -> Any:
        """One layer's cache, as `write_cache` and `attention` take it, out of `Cache.layers`. Default: from a list."""
        return caches[index]

    def with_layer_cache(self, caches: Any, index: int, cache: Any) -> Any:
        """`Cache.layers` with one layer's cache replaced. Default: a new list."""
        return [*caches[:index], cache, *caches[index + 1 :]]

    # ------------------------------------------------------------------ composites

    def decoder(self, x: Any, layers: Any, caches: Any, ctx: StepContext) -> tuple[Any, Any]:
        """All decoder layers: [T, E], their parameters, `Cache.layers` → [T, E], `Cache.layers`."""

        def body(x: Any, layer: Any, cache: Any, index: int) -> tuple[Any, Any]:
            x, cache = self.attention_block(x, layer, cache, ctx, ctx.model.sliding_window[index])
            return self.mlp_block(x, layer, ctx), cache

        return self.layers(body, x, layers, caches)

    def attention_block(self, x: Any, layer: Any, cache: Any, ctx: StepContext, window: int | None) -> tuple[Any, Any]:
        """x + output(attention(norm(x))) with rotary embedding and cache write; [T, E] → [T, E], cache."""
        m = ctx.model
        h = self.rms_norm(x, layer["attn_norm"], m.norm_eps)
        q = self.xp.reshape(self.linear(h, layer["q"], layer.get("q_bias")), (-1, m.num_heads, m.head_dim))
        k = self.xp.reshape(self.linear(h, layer["k"], layer.get("k_bias")), (-1, m.num_kv_heads, m.head_dim))
        v = self.xp.reshape(self.linear(h, layer["v"], layer.get("v_bias")), (-1, m.num_kv_heads, m.head_dim))
        q, k = self.rotary(q, ctx.cos, ctx.sin), self.rotary(k, ctx.cos, ctx.sin)
        cache = self.write_cache(cache, k, v, ctx)
        out = self.attention(q, k, v, cache, ctx, window)
        out = self.xp.reshape(out, (-1, m.num_heads * m.head_dim))
        return x + self.linear(out, layer["o"], layer.get("o_bias")), cache

    def mlp_block(self, x: Any, layer: Any, ctx: StepContext) -> Any:
        """x + down(activation(gate(h)) * up(h)) with h = norm(x); [T, E] → [T, E]."""
        h = self.rms_norm(x, layer["mlp_norm"], ctx.model.norm_eps)
        gate = self.linear(h, layer["gate"], layer.get("gate_bias"))
        up = self.linear(h, layer["up"], layer.get("up_bias"))
        h = self.activation(gate, ctx.model.activation) * up
        return x + self.linear(h, layer["down"], layer.get("down_bias"))

    # ------------------------------------------------------------------ pieces

    def embed(self, table: Any, token_ids: Any) -> Any:
        """Rows of the embedding: [V, E], int32 [T] → [T, E]."""
        return self.xp.take(table, token_ids, axis=0)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x times the transposed weight [out, in], plus bias [out]."""
        out = self.xp.matmul(x, self.xp.matrix_transpose(weight))
        return out if bias is None else out + bias

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        """x / sqrt(mean(x²) + eps) × weight over the last axis (arXiv 1910.07467), computed in `wide`."""
        xp = self.xp
        h = xp.astype(x, self.wide)
        h = h / xp.sqrt(xp.mean(h * h, axis=-1, keepdims=True) + eps)
        return xp.astype(h, x.dtype) * weight

    def rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        """Rotates the pairs (i, i + D / 2) of each head: [T, heads, D] → [T, heads, D]."""
        xp = self.xp
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :], sin[:, None, :]
        a, b = xp.astype(x[..., :half], self.wide), xp.astype(x[..., half:], self.wide)
        return xp.astype(xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)

    def activation(self, x: Any, kind: str) -> Any:
        """ "silu", "gelu" or "gelu_tanh"; written with tanh, which cannot overflow, and for "gelu" with erf."""
        xp = self.xp
        if kind == "silu":
            return x * (0.5 + 0.5 * xp.tanh(0.5 * x))
        if kind == "gelu_tanh":
            inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
            return x * (0.5 + 0.5 * xp.tanh(inner))
        if kind == "gelu":
            wide = xp.astype(x, self.wide)
            return xp.astype(wide * (0.5 + 0.5 * self.erf(wide * math.sqrt(0.5))), x.dtype)
        raise ValueError(f"unknown activation {kind!r}")

    def erf(self, x: Any) -> Any:
        """The error function, which the array API lacks. Default: Abramowitz and Stegun 7.1.26, exact to 1.5e-7."""
        xp = self.xp
        t = 1.0 / (1.0 + 0.3275911 * xp.abs(x))
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        return xp.sign(x) * (1.0 - tail * xp.exp(-x * x))

    def logits(self, x: Any, weight: Any) -> Any:
        """[R, E] times the transposed [V, E] → [R, V] in `wide`."""
        return self.xp.astype(self.linear(x, weight), self.wide)

    # ------------------------------------------------------------------ sampling

    def draw(self, shape: SamplerShape, scores: Any, s: SamplingInput) -> Any:
        """A token per row from adjusted logits [R, V]: int32 [R].

        Where the temperature is 0 the first of the largest, else a draw by `gumbel` from softmax(scores / temperature)
        over what the filters keep. Default: the ops below (`sampling/sampler.py`).
        """
        return sampler.draw(self, shape, scores, s)

    def top_k(self, x: Any, k: int) -> tuple[Any, Any]:
        """The k largest of each row, largest first, ties in any order: [R, V] → [R, k], int32 [R, k].

        Default: by sorting.
        """
        xp = self.xp
        order = xp.argsort(x, axis=-1, descending=True, stable=True)[:, :k]
        return xp.take_along_axis(x, order, axis=-1), xp.astype(order, xp.int32)

    def scatter(self, x: Any, ids: Any, values: Any) -> Any:
        """x [R, V] with x[r, ids[r, a]] = values[r, a]; an id of -1 is skipped. Default: one pass over x per a."""
        xp = self.xp
        columns = xp.arange(x.shape[-1], dtype=xp.int32, device=device_of(x))[None, :]
        for a in range(ids.shape[-1]):
            x = xp.where(columns == ids[:, a : a + 1], values[:, a : a + 1], x)
        return x

    def threshold(self, logits: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """The least logit of each row that top-k, top-p and min-p keep: float32 [R, V] → [R, 1].

        Default: bisection, a fixed number of passes and no sort (`sampling/filters.py`).
        """
        return filters.threshold(self.xp, logits, top_k, top_p, min_p)

    def gumbel(self, seed: Any, position: Any, vocab_size: int) -> Any:
        """Standard Gumbel noise, a function of (seed, position, token) alone: int32 [R, 2], [R] → float32 [R, V].

        Default: `sampling/rng.py`. An override must give the same bits before the logarithms.
        """
        return rng.gumbel(self.xp, seed, position, vocab_size)
