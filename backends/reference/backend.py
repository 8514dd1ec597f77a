"""The reference backend: what is abstract in `Backend`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from ...core.backend import Backend, BackendConfig, CacheSpec, Capabilities, StepConstraints, StepLimits
from ...core.errors import OutOfMemoryError
from ...core.models.spec import ModelSpec, ParamSpec
from ...core.models.weights import HostTensor, WeightSource
from ..host import host_memory
from .ops import LayerCache, ReferenceOps

DTYPES = ("float32", "float64", "float16")


class ReferenceBackend(Backend):
    """Runs any step at once, in NumPy. With dtype float64 everything but the sampler's noise is in float64."""

    # The host's memory is not ours alone.
    default_utilization = 0.8
    default_cache_share = 0.1

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.xp = xp
        self.ops = ReferenceOps()

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, kv_dtypes=DTYPES, block_sizes=(16, 8, 32, 64, 128))

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        return StepConstraints()

    def device_memory(self) -> tuple[int, int]:
        return host_memory()

    def pick_dtype(self, model: ModelSpec) -> str:
        """float32 for the 16-bit dtypes as well: NumPy lacks bfloat16 and is slow with float16."""
        return "float64" if model.dtype == "float64" else "float32"

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def place(self, param: ParamSpec, value: HostTensor) -> np.ndarray:
        dtype = "float32" if param.kind == "table" else self._dtype
        source = value.float32() if value.dtype == "bfloat16" else value.data
        return source.astype(dtype)

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self._dtype = self.dtype(model)
        self.ops.wide = np.float64 if self._dtype == "float64" else np.float32
        super().load(model, weights, progress)

    def new_layers(self, spec: CacheSpec, num_blocks: int) -> list[LayerCache]:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        try:
            return [
                LayerCache(np.zeros(shape, spec.dtype), np.zeros(shape, spec.dtype)) for _ in range(spec.num_layers)
            ]
        except MemoryError as error:
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks of {spec.block_bytes} bytes do not fit into memory; "
                f"lower --memory-utilization or --kv-cache-memory."
            ) from error

    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        parts = [array[blocks].reshape(len(blocks), -1) for layer in self.cache.layers for array in layer]
        return np.concatenate(parts, axis=1).view(np.uint8)

    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        arrays = [array for layer in self.cache.layers for array in layer]
        parts = np.split(np.ascontiguousarray(contents).view(arrays[0].dtype), len(arrays), axis=1)
        for array, part in zip(arrays, parts, strict=True):
            array[blocks] = part.reshape(-1, *array.shape[1:])
