"""How parameters and the cache lie on the devices: a mesh with one axis, "tp", also where it has one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.models.spec import ModelSpec, ParamSpec
from .padding import Padding, pad, split_axis

AXIS = "tp"


class DeviceMesh:
    """The devices of one backend. Models are padded so that everything that is split divides over them.

    Attributes:
        size: devices.
        replicated: the sharding of what every device has in full.
        cache: the sharding of the KV cache: by heads.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._mesh = Mesh(np.asarray(devices), (AXIS,))
        self.size = len(devices)
        self.replicated = self.sharding()
        self.cache = self.sharding(None, None, None, AXIS)

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The sharding of arrays whose axes are split (AXIS) or not (None)."""
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def padding(self, model: ModelSpec) -> Padding:
        """How the model is padded on this mesh."""
        return pad(model, self.size)

    def param(self, param: ParamSpec) -> NamedSharding:
        """Where a parameter lies."""
        axes: list[str | None] = [None] * len(param.shape)
        if param.shard is not None:
            axes[split_axis(param)] = AXIS
        return self.sharding(*axes)

    def per_device(self, function: Callable[..., Any], split: Any, out: PartitionSpec) -> Callable[..., Any]:
        """The function as each device runs it on its part.

        What computes on heads is written for one device: no compiler has to find out how to divide a gather over
        blocks, or a kernel, which it cannot look into.

        Args:
            split: how each argument is split, as a tuple of PartitionSpec.
            out: how the result is.
        """
        return jax.shard_map(function, mesh=self._mesh, in_specs=split, out_specs=out, check_vma=False)


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array, the same on every host, on the devices.

    JAX may keep the host's memory instead of copying it, so it is given a copy. `device_put` would compare the arrays
    of several hosts with each other, over the network.
    """
    copy = np.array(array)
    if sharding.is_fully_addressable:
        return jax.device_put(copy, sharding)
    return jax.make_array_from_callback(copy.shape, sharding, copy.__getitem__)
