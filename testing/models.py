"""Small random models: the shapes of real families, with weights that are a function of a seed."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.models.spec import ModelSpec, ParamSpec, RopeSpec
from ..core.models.weights import HostTensor


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama of two layers whose widths are all different, so that mixing two up shows."""
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 199,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "norm_eps": 1e-5,
        "max_position": 4096,
    }
    fields |= changes
    if "rope" not in fields:
        fields["rope"] = rope(fields["head_dim"])
    return ModelSpec(**fields)


def rope(head_dim: int, theta: float = 10000.0) -> RopeSpec:
    """Unscaled rotary frequencies."""
    return RopeSpec(tuple(theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)))


@dataclass(frozen=True)
class RandomWeights:
    """A weight source: normal numbers that keep activations near unit size; norms near 1.

    Attributes:
        seed: which numbers.
        dtype: "float32" or "float64", of what is read.
    """

    seed: int = 0
    dtype: str = "float32"

    def read(self, param: ParamSpec) -> HostTensor:
        """A function of (seed, path) alone, so that order and repetition do not matter."""
        rng = np.random.default_rng((self.seed, zlib.crc32(param.path.encode())))
        values = rng.standard_normal(param.shape, np.float32)
        if param.kind == "norm":
            values = 1.0 + 0.1 * values
        elif param.kind == "linear":
            values = values / math.sqrt(param.shape[-1])
        elif param.kind == "bias":
            values = 0.1 * values
        return HostTensor(values.astype(self.dtype), self.dtype)
