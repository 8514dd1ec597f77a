"""How parameters and the cache lie on the devices: a mesh with one axis, "tp", also where it has one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.errors import ConfigError
from ...core.models.spec import ModelSpec, ParamSpec

AXIS = "tp"
# Which axis of a parameter is split, by what the model says of it.
_SPLIT = {"column": 0, "vocab": 0, "row": -1}


class DeviceMesh:
    """The devices of one backend.

    Attributes:
        size: devices.
        replicated: the sharding of what every device has in full.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._mesh = Mesh(np.asarray(devices), (AXIS,))
        self.size = len(devices)
        self.replicated = self._sharding()

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def check(self, model: ModelSpec) -> None:
        """Raises ConfigError when the model cannot be split over so many devices."""
        for what, count in (("attention heads", model.num_heads), ("MLP columns", model.intermediate_size)):
            if count % self.size:
                fits = [n for n in range(1, self.size) if not model.num_heads % n and not model.intermediate_size % n]
                raise ConfigError(
                    f"tensor_parallel={self.size} does not divide the model's {count} {what}; "
                    f"{', '.join(map(str, fits))} would."
                )

    def kv_split(self, model: ModelSpec) -> bool:
        """Whether key/value heads are split; where they do not divide, every device has all of them."""
        return model.num_kv_heads % self.size == 0

    def param(self, model: ModelSpec, param: ParamSpec, stacked: bool = False) -> NamedSharding:
        """Where a parameter lies.

        Args:
            stacked: whether the array has an axis of layers before the parameter's own.
        """
        lead = (None,) if stacked else ()
        if not self.is_split(model, param):
            return self._sharding(*lead)
        axes: list[str | None] = [None] * len(param.shape)
        axes[_SPLIT[param.shard or ""]] = AXIS
        return self._sharding(*lead, *axes)

    def is_split(self, model: ModelSpec, param: ParamSpec) -> bool:
        """Whether each device has only its part: not for keys and values that do not divide, nor such vocabularies."""
        name = param.path.rpartition(".")[2].removesuffix("_bias")
        if param.shard is None or (name in ("k", "v") and not self.kv_split(model)):
            return False
        return param.shape[_SPLIT[param.shard]] % self.size == 0

    def cache(self, model: ModelSpec) -> NamedSharding:
        """Where the KV cache lies: split by heads."""
        return self._sharding(None, None, None, AXIS) if self.kv_split(model) else self.replicated


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array on the devices. JAX may keep the host's memory instead of copying it, so it is given a copy."""
    return jax.device_put(np.array(array), sharding)
