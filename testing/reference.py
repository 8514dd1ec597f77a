"""What the ops have to compute, in float64 NumPy, written plainly and apart from core and from every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..core.models.spec import ModelSpec

Array = np.ndarray


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """[n, in], [out, in], [out] → [n, out]."""
    out = np.einsum("ni,oi->no", x, weight)
    return out if bias is None else out + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotary_table(inv_freq: Array, positions: Array, factor: float) -> tuple[Array, Array]:
    """cos and sin, [T, D / 2]."""
    angles = np.outer(positions.astype(np.float64), inv_freq)
    return np.cos(angles) * factor, np.sin(angles) * factor


def rotary(x: Array, cos: Array, sin: Array) -> Array:
    """[T, heads, D], as a product of complex numbers (first half real, second half imaginary parts)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def activation(x: Array, kind: str) -> Array:
    """Of the gated MLP."""
    if kind == "silu":
        return x / (1.0 + np.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"unknown activation {kind!r}")


def attention(q: Array, keys: Array, values: Array, window: int | None, scale: float) -> Array:
    """Of the last n tokens of a sequence of m: q [n, H, D], keys and values [m, K, D] → [n, H, D]."""
    n, heads, _ = q.shape
    m, kv_heads, _ = keys.shape
    out = np.empty_like(q)
    for i in range(n):
        at = m - n + i
        low = 0 if window is None else max(0, at - window + 1)
        for h in range(heads):
            group = h // (heads // kv_heads)
            scores = keys[low : at + 1, group] @ q[i, h] * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values[low : at + 1, group] / weights.sum()
    return out


def decoder(model: ModelSpec, read: Callable[[str], Array], tokens: Array) -> Array:
    """Logits [T, V] of one sequence, without a cache.

    Args:
        read: the parameter with a path, in float64.
    """
    m = model
    inv_freq = np.asarray(m.rope.inv_freq, np.float32).astype(np.float64)  # float32 on every device
    cos, sin = rotary_table(inv_freq, np.arange(len(tokens)), m.rope.attention_factor)
    x = read("embed")[tokens]
    for i in range(m.num_layers):
        at = f"layers.{i}."

        def project(h: Array, name: str, bias: bool, at: str = at) -> Array:
            return linear(h, read(at + name), read(at + name + "_bias") if bias else None)

        h = rms_norm(x, read(at + "attn_norm"), m.norm_eps)
        q, k, v = (project(h, name, m.qkv_bias).reshape(len(tokens), -1, m.head_dim) for name in "qkv")
        out = attention(rotary(q, cos, sin), rotary(k, cos, sin), v, m.sliding_window[i], 1 / math.sqrt(m.head_dim))
        x = x + project(out.reshape(len(tokens), -1), "o", m.o_bias)
        h = rms_norm(x, read(at + "mlp_norm"), m.norm_eps)
        h = activation(project(h, "gate", m.mlp_bias), m.activation) * project(h, "up", m.mlp_bias)
        x = x + project(h, "down", m.mlp_bias)
    x = rms_norm(x, read("norm"), m.norm_eps)
    return linear(x, read("embed" if m.tie_embeddings else "lm_head"))


# ------------------------------------------------------------------------------------------------ sampling


def random_bits(seed: Array, position: int, vocab_size: int) -> Array:
    """The 32 random bits of each token: uint32 [V]. Threefry-2x32-20 for two keys, then a keyed hash per token."""
    with np.errstate(over="ignore"):
        k0, k1 = np.asarray(seed).astype(np.int64).astype(np.uint32)
        schedule = [k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA)]
        x, y = np.uint32(position) + k0, np.uint32(0) + k1
        for r in range(20):
            turn = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
            x = x + y
            y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
            if r % 4 == 3:
                x = x + schedule[(r // 4 + 1) % 3]
                y = y + schedule[(r // 4 + 2) % 3] + np.uint32(r // 4 + 1)
        h = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B9) + x
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ y
        h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
        return h ^ h >> np.uint32(16)


def gumbel(seed: Array, position: int, vocab_size: int) -> Array:
    """Gumbel noise [V] of those bits; u is rounded to float32 as on the device."""
    bits = random_bits(seed, position, vocab_size).astype(np.float64)
    u = np.minimum(((bits + 0.5) / 2**32).astype(np.float32), np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-u))


def kept(logits: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Which tokens of a row [V] the filters keep; those that tie with the last one included."""
    keep = logits > -np.inf if (logits > -np.inf).any() else np.ones(len(logits), bool)
    weights = np.exp(logits - logits.max()) if logits.max() > -np.inf else np.ones(len(logits))
    order = np.argsort(-logits, kind="stable")
    finite = int((logits > -np.inf).sum())
    if 0 < top_k <= finite:
        keep &= logits >= logits[order[top_k - 1]]
    within_k = keep.copy()
    if top_p < 1.0:
        ordered = [i for i in order if within_k[i]]
        mass = np.cumsum(weights[ordered])
        last = ordered[int(np.argmax(mass >= top_p * mass[-1] * (1 - 1e-12)))]
        keep &= logits >= logits[last]
    if min_p > 0.0:
        keep &= weights >= min_p * (1 - 1e-12)
    return keep


def adjusted(logits: Array, row: Mapping[str, Array]) -> Array:
    """A row of logits [V] with bias and penalties; `row` has the fields of SamplingInput for this row."""
    out = np.full(len(logits), -np.inf) if row["only_adjusted"] else logits.astype(np.float64).copy()
    for token, bias, count, seen in zip(
        row["adjust_ids"], row["adjust_bias"], row["adjust_counts"], row["adjust_seen"], strict=True
    ):
        if token < 0:
            continue
        value = np.float64(logits[token]) + np.float64(bias)
        if seen:
            value = np.float64(value / row["repetition"] if value > 0 else value * row["repetition"])
        out[token] = value - row["frequency"] * count - (row["presence"] if count > 0 else 0.0)
    return out


def scores(logits: Array, row: Mapping[str, Array]) -> Array:
    """What the sampler takes the largest of: float64 [V]."""
    x = adjusted(logits, row)
    if row["temperature"] == 0:
        return x
    x = (x - x.max()) / row["temperature"]
    keep = kept(x, int(row["top_k"]), float(row["top_p"]), float(row["min_p"]))
    return np.where(keep, x + gumbel(row["seed"], int(row["position"]), len(x)), -np.inf)


def log_softmax(logits: Array) -> Array:
    """Of a row or of rows."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
