"""The CPU backend with compiled kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from ....core.backend import BackendConfig, CacheSpec, Capabilities, MemoryPlan, StepLimits
from ....core.models.spec import DTYPE_BYTES, ModelSpec
from ....core.models.weights import WeightSource, build_params
from ...torch.dtypes import DTYPES as TORCH_DTYPES
from ..host import HostBackend
from .library import Library
from .ops import KV_FORMATS, LayerCache, NativeOps, layer_block_bytes
from .weights import FORMATS, Packer, Storage, weight_bytes


class NativeBackend(HostBackend):
    """Weights in panels, and KV blocks that attention reads where they lie. Activations are float32.

    Args:
        threads: that torch computes with, where its operations are used; None: torch's own choice.
    """

    ops: NativeOps
    block_axis = 0

    def __init__(self, config: BackendConfig, library: Library, threads: int | None) -> None:
        super().__init__(config, NativeOps(library), threads)
        self._library = library

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=tuple(FORMATS), kv_dtypes=tuple(KV_FORMATS), block_sizes=(16, 32, 64, 128))

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        plan, spec = super().memory(model, limits), self.cache_spec(model, limits)
        weights = weight_bytes(self._library, model, self._storage(model))
        # Activations are float32 beside weights of two bytes as well.
        activations = plan.activations * 4 // DTYPE_BYTES[self.dtype(model)]
        block_bytes = spec.num_layers * sum(layer_block_bytes(spec, self._library.lanes))
        storage = self._storage(model)
        kept = Counter(f.name for f in storage.kept.values())
        formats = ", ".join(name for name, _ in kept.most_common()) or storage.quantization or storage.dtype
        return replace(plan, weights=weights, weight_format=formats, activations=activations, block_bytes=block_bytes)

    def _storage(self, model: ModelSpec) -> Storage:
        """Matrices of few bits stay as they are, unless another width was asked for."""
        quantization = self.config.options.get("quantization")
        keeps = self.config.dtype == "auto" and quantization is None
        return Storage(self.dtype(model), quantization, dict(model.weight_formats) if keeps else {})

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self.model = model
        self._dtype = TORCH_DTYPES[self.dtype(model)]
        packer = Packer(self._library, model, self._storage(model))
        params = build_params(model, weights, packer.place, progress)
        self.params = params | {"layers": packer.layers}

    def new_layer(self, spec: CacheSpec, num_blocks: int) -> LayerCache:
        return LayerCache(spec, num_blocks, self._library.lanes)

    def block_tensors(self) -> list[torch.Tensor]:
        return [half for layer in self.cache.layers for half in (layer.keys, layer.values)]

    def close(self) -> None:
        super().close()
        self._library.close()
