"""Rotary frequencies: the base series and the ways in which checkpoints stretch it to a longer context.

Sources: RoFormer (arXiv 2104.09864), position interpolation (arXiv 2306.15595) for "linear", YaRN (arXiv
2309.00071), and the Llama 3.1 model card for "llama3". Field names are those of Hugging Face's config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..errors import ModelError
from .config import Config
from .spec import RopeSpec

# (head_dim, theta, parameters) -> (head_dim / 2 frequencies as float32, factor on cos and sin)
Scaling = Callable[[int, float, Config], tuple[np.ndarray, float]]


def base_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """The unscaled frequencies theta ** (-2 i / head_dim), float32 [head_dim / 2], radians per position."""
    # In float32 throughout, as models were trained: a float64 power rounds differently in the last bit.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.power(np.float32(theta), exponents)


def rope_spec(head_dim: int, config: Config) -> RopeSpec:
    """Reads the rotary embedding of a config.json, in the spelling of Transformers 4 or 5.

    Args:
        head_dim: width of one head, even.
        config: the model's configuration.

    Raises:
        ModelError: the scaling type is unknown, or one of its fields is missing or senseless.
    """
    rope = config.section("rope_scaling") or config.section("rope_parameters") or Config({}, config.where)
    if any(isinstance(value, dict) for value in rope.data.values()):
        raise config.error("rope_parameters", "differs between kinds of layers, which Octavo cannot run yet")
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise config.error("partial_rotary_factor", "is not 1: rotating part of a head is not supported yet")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = rope.data.get("rope_type", rope.data.get("type")) or "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise config.error("rope_scaling", f"has type {kind!r}, which Octavo does not know (it knows {known})")
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        trained = config.data.get(key) or rope.data.get(key) or config.data["max_position_embeddings"]
        rope = Config({**rope.data, key: trained}, rope.where)
    frequencies, attention_factor = SCALINGS[kind](head_dim, theta, rope)
    if not (np.isfinite(frequencies).all() and math.isfinite(attention_factor)):
        raise config.error("rope_scaling", "gives frequencies that are not finite; check rope_theta and its factors")
    return RopeSpec(tuple(frequencies.astype(np.float32).tolist()), attention_factor)


def divide_by_factors(rope: RopeSpec, factors: np.ndarray) -> RopeSpec:
    """Applies a table of per-frequency divisors, as llama.cpp stores llama3 scaling (`rope_freqs.weight`).

    Args:
        rope: the frequencies before.
        factors: float32 [head_dim / 2], none zero.
    """
    divided = np.asarray(rope.inv_freq, np.float32) / factors.astype(np.float32)
    if not np.isfinite(divided).all():
        raise ModelError("rope_freqs.weight holds a zero or a value that is not finite; the file is damaged")
    return RopeSpec(tuple(divided.tolist()), rope.attention_factor)


def _default(head_dim: int, theta: float, rope: Config) -> tuple[np.ndarray, float]:
    return base_frequencies(head_dim, theta), 1.0


def _linear(head_dim: int, theta: float, rope: Config) -> tuple[np.ndarray, float]:
    return base_frequencies(head_dim, theta) / np.float32(rope.number("factor")), 1.0


def _llama3(head_dim: int, theta: float, rope: Config) -> tuple[np.ndarray, float]:
    factor, trained = rope.number("factor"), rope.number("original_max_position_embeddings")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low == high:
        raise rope.error("high_freq_factor", "equals low_freq_factor; they bound a range")
    base = base_frequencies(head_dim, theta)
    # Turns made within the training context: many, the frequency stays; few, it is divided; between, blended.
    turns = np.float32(trained) / (np.float32(2 * math.pi) / base)
    keep = np.clip((turns - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return (1 - keep) * base / np.float32(factor) + keep * base, 1.0


def _yarn(head_dim: int, theta: float, rope: Config) -> tuple[np.ndarray, float]:
    trained = rope.number("original_max_position_embeddings")
    factor = rope.number("factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def bound(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    numerator, denominator = rope.number("mscale", 0.0, low=0.0), rope.number("mscale_all_dim", 0.0, low=0.0)
    scale = magnitude(numerator) / magnitude(denominator) if numerator and denominator else magnitude(1.0)
    if theta <= 1:
        raise rope.error("rope_theta", "must be above 1 for YaRN")
    low = bound(rope.number("beta_fast", 32.0))
    high = bound(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    base = base_frequencies(head_dim, theta)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    return base / np.float32(factor) * ramp + base * (1 - ramp), rope.number("attention_factor", scale)


SCALINGS: dict[str, Scaling] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
