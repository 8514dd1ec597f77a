"""Weights on their way from a checkpoint to a device: one tensor at a time, never a second full copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from .spec import ModelSpec, ParamSpec, WeightFormat, model_params


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


class QuantizedTensor(HostTensor):
    """A matrix of few bits a number. To whoever does not compute on those it is a float32 tensor.

    Attributes:
        format: how it is kept.
        numbers: int8 [N, K]; of 4 bits, from 0 to 15.
        scales: float32 [N, K / format.group].
        least: float32 [N, K / format.group], or None where `format.least` is not set.
    """

    def __init__(
        self, format: WeightFormat, numbers: np.ndarray, scales: np.ndarray, least: np.ndarray | None = None
    ) -> None:
        self.__dict__.update(format=format, numbers=numbers, scales=scales, least=least, dtype="float32")

    format: WeightFormat
    numbers: np.ndarray
    scales: np.ndarray
    least: np.ndarray | None

    @cached_property
    def data(self) -> np.ndarray:
        """The values, float32 [N, K]."""
        groups = self.numbers.reshape(*self.scales.shape, -1).astype(np.float32)
        with np.errstate(all="ignore"):  # scales of a damaged file
            groups *= self.scales[..., None]
            if self.least is not None:
                groups += self.least[..., None]
        return groups.reshape(self.numbers.shape)

    def take(self, rows: np.ndarray) -> QuantizedTensor:
        """These rows of it."""
        least = None if self.least is None else self.least[rows]
        return QuantizedTensor(self.format, self.numbers[rows], self.scales[rows], least)


class WeightSource(Protocol):
    """Where a model's parameters come from: a safetensors or GGUF checkpoint, or a test's random numbers."""

    def read(self, param: ParamSpec) -> HostTensor:
        """The parameter's values, in param.shape; a QuantizedTensor for those in `ModelSpec.weight_formats`.

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
