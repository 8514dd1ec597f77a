"""The CPU backend with compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ....core.backend import BackendConfig, CacheSpec, Capabilities, MemoryPlan, StepLimits
from ....core.errors import OutOfMemoryError
from ....core.models.spec import DTYPE_BYTES, ModelSpec
from ....core.models.weights import WeightSource, build_params
from ...host import host_memory
from ...torch.backend import TorchBackend
from ...torch.dtypes import DTYPES as TORCH_DTYPES
from .library import Library
from .ops import LayerCache, NativeOps
from .weights import FORMATS, Packer, Storage, weight_bytes


class NativeBackend(TorchBackend):
    """Weights in panels, and KV blocks that attention reads where they lie. Activations are float32."""

    ops: NativeOps

    # The host's memory is not ours alone.
    default_utilization = 0.8
    default_cache_share = 0.1

    def __init__(self, config: BackendConfig, library: Library) -> None:
        super().__init__(config, torch.device("cpu"), NativeOps(library))
        self._library = library

    def capabilities(self) -> Capabilities:
        dtypes = tuple(FORMATS)
        return Capabilities(dtypes=dtypes, kv_dtypes=dtypes, block_sizes=(16, 32, 64, 128))

    def device_memory(self) -> tuple[int, int]:
        return host_memory()

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        """Values have rows of whole registers, which heads of all known models fill."""
        plan, spec = super().memory(model, limits), self.cache_spec(model, limits)
        wide = replace(spec, head_dim=-(-spec.head_dim // self._library.lanes) * self._library.lanes)
        weights = weight_bytes(self._library, model, self._storage(model))
        # Activations are float32 beside weights of two bytes as well.
        activations = plan.activations * 4 // DTYPE_BYTES[self.dtype(model)]
        block_bytes = (spec.block_bytes + wide.block_bytes) // 2
        return replace(plan, weights=weights, activations=activations, block_bytes=block_bytes)

    def _storage(self, model: ModelSpec) -> Storage:
        return Storage(self.dtype(model), self.config.options.get("quantization"))

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self.model = model
        self._dtype = TORCH_DTYPES[self.dtype(model)]
        packer = Packer(self._library, model, self._storage(model))
        params = build_params(model, weights, packer.place, progress)
        self.params = params | {"layers": packer.layers}

    def new_layers(self, spec: CacheSpec, num_blocks: int) -> list[LayerCache]:
        try:
            return [
                LayerCache(spec, num_blocks, TORCH_DTYPES[spec.dtype], self._library.lanes)
                for _ in range(spec.num_layers)
            ]
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks of {spec.block_bytes} bytes do not fit into memory; "
                f"lower --memory-utilization or --kv-cache-memory."
            ) from error

    def _halves(self) -> list[torch.Tensor]:
        return [half for layer in self.cache.layers for half in (layer.keys, layer.values)]

    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        index = self.from_host(blocks)
        parts = [half.index_select(0, index).flatten(1) for half in self._halves()]
        return torch.cat(parts, dim=1).view(torch.uint8).numpy()

    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        index, halves = self.from_host(blocks).long(), self._halves()
        parts = self.from_host(contents).view(halves[0].dtype).chunk(len(halves), dim=1)
        for half, part in zip(halves, parts, strict=True):
            half.index_copy_(0, index, part.reshape(len(blocks), *half.shape[1:]))

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        read, write = self.from_host(source), self.from_host(target).long()
        for half in self._halves():
            half.index_copy_(0, write, half.index_select(0, read))

    def close(self) -> None:
        super().close()
        self._library.close()
