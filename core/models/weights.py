"""Weights on their way from a checkpoint to a device: one tensor at a time, never a second full copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .spec import ModelSpec, ParamSpec, model_params


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, usually a view of a memory-mapped file.

    Attributes:
        data: the values; bfloat16, which NumPy lacks, is held as its bits in uint16.
        dtype: "float64", "float32", "float16" or "bfloat16".
    """

    data: np.ndarray
    dtype: str

    def float32(self) -> np.ndarray:
        """The values as float32 (a view where they already are)."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32, copy=False)


class WeightSource(Protocol):
    """Where a model's parameters come from: a safetensors or GGUF checkpoint, or a test's random numbers."""

    def read(self, param: ParamSpec) -> HostTensor:
        """The parameter's values, in param.shape.

        Raises:
            ModelError: the checkpoint lacks it, or has it in another shape.
        """
        ...


Place = Callable[[ParamSpec, HostTensor], Any]


def build_params(
    model: ModelSpec, source: WeightSource, place: Place, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Reads every parameter and hands it to `place`, which puts it on the device.

    Args:
        place: called once for each parameter with its description and its host values; what it returns
            stands in the tree. It must copy: the host values may be a view of a file.
        progress: called with (parameters placed, parameters in all).

    Returns:
        The parameter tree: {"embed", "rope_inv_freq", "norm", "lm_head" unless tied, "layers": [{...}, ...]}.
    """
    params: dict[str, Any] = {"layers": [{} for _ in range(model.num_layers)]}
    specs = list(model_params(model))
    for done, spec in enumerate(specs, 1):
        if spec.kind == "table":
            host = HostTensor(np.asarray(model.rope.inv_freq, np.float32), "float32")
        else:
            host = source.read(spec)
        head, _, rest = spec.path.partition(".")
        if rest:
            layer, name = rest.split(".")
            params[head][int(layer)][name] = place(spec, host)
        else:
            params[head] = place(spec, host)
        if progress:
            progress(done, len(specs))
    return params
