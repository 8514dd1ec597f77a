"""What the backends that run eager torch have in common: arrays, parameters, the cache and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch

from ...core.backend import Backend, BackendConfig, CacheSpec, MemoryPlan, Step, StepConstraints, StepLimits, StepOutput
from ...core.errors import OutOfMemoryError
from ...core.models.spec import ModelSpec, ParamSpec
from ...core.models.weights import HostTensor, WeightSource
from .dtypes import DTYPES, as_torch
from .ops import TorchOps
from .pack import pack_layer
from .plan import TILE_BYTES


class TorchBackend(Backend):
    """One torch device, eager. A layer's cache is one tensor [2 K, blocks, block size, D], keys first.

    Attributes:
        device: torch's device.
        block_axis: which axis of the tensors that hold the cache counts blocks.
    """

    block_axis = 1

    ops: TorchOps

    def __init__(self, config: BackendConfig, device: torch.device, ops: TorchOps | None = None) -> None:
        super().__init__(config)
        self.device = device
        self.xp = xp
        self.ops = ops or TorchOps(device)

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        return StepConstraints()

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        plan = super().memory(model, limits)
        # Gathered keys and values, converted once, and scores and products of about the same size.
        return replace(plan, activations=plan.activations + 4 * TILE_BYTES)

    # Arrays

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        array = array.detach().cpu()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def place(self, param: ParamSpec, value: HostTensor) -> torch.Tensor:
        dtype = torch.float32 if param.kind == "table" else self._dtype
        return as_torch(value).to(device=self.device, dtype=dtype, copy=True)

    # The model and its cache

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self._dtype = DTYPES[self.dtype(model)]
        self.ops.wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        super().load(model, weights, progress)
        for layer in self.params["layers"]:
            pack_layer(layer)

    def new_layer(self, spec: CacheSpec, num_blocks: int) -> Any:
        """One layer's cache, zeroed. Whoever overrides it overrides `block_tensors` as well."""
        shape = (2 * spec.num_kv_heads, num_blocks, spec.block_size, spec.head_dim)
        # Filled rather than made of zeros, which is done in one thread on a CPU.
        return torch.empty(shape, dtype=DTYPES[spec.dtype], device=self.device).fill_(0)

    def block_tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the cache of all layers."""
        return list(self.cache.layers)

    def new_layers(self, spec: CacheSpec, num_blocks: int) -> list[Any]:
        try:
            return [self.new_layer(spec, num_blocks) for _ in range(spec.num_layers)]
        except (RuntimeError, OSError) as error:
            if "memory" not in str(error):
                raise
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks of {spec.block_bytes} bytes do not fit into the memory of {self.device}; "
                f"lower --memory-utilization or --kv-cache-memory."
            ) from error

    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        index, axis = self.from_host(blocks), self.block_axis
        parts = [t.index_select(axis, index).movedim(axis, 0).flatten(1) for t in self.block_tensors()]
        return torch.cat(parts, dim=1).view(torch.uint8).cpu().numpy()

    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        index, axis, tensors = self.from_host(blocks).long(), self.block_axis, self.block_tensors()
        sizes = [t.numel() // t.shape[axis] for t in tensors]
        parts = self.from_host(contents).view(tensors[0].dtype).split(sizes, dim=1)
        for tensor, part in zip(tensors, parts, strict=True):
            shape = (len(blocks), *tensor.shape[:axis], *tensor.shape[axis + 1 :])
            tensor.index_copy_(axis, index, part.reshape(shape).movedim(0, axis))

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        read, write = self.from_host(source), self.from_host(target).long()
        for tensor in self.block_tensors():
            tensor.index_copy_(self.block_axis, write, tensor.index_select(self.block_axis, read))

    # Steps

    @torch.inference_mode()
    def submit(self, step: Step) -> StepOutput:
        return super().submit(step)
