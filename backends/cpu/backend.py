"""The CPU backend itself; imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...core.backend import BackendConfig, Capabilities, MemoryPlan, StepLimits
from ...core.models.spec import DTYPE_BYTES, ModelSpec
from ...core.models.weights import WeightSource
from ..torch.dtypes import DTYPES as TORCH_DTYPES
from .cpuinfo import cpu_info
from .host import HostBackend
from .onednn import can_pack, pack_params
from .ops import CpuOps

DTYPES = ("float32", "bfloat16", "float16", "float64")


class CpuBackend(HostBackend):
    """Eager torch on the host's processors."""

    def __init__(self, config: BackendConfig, threads: int | None = None) -> None:
        super().__init__(config, CpuOps(torch.device("cpu")), threads)

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, kv_dtypes=DTYPES, block_sizes=(16, 8, 32, 64, 128))

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        plan = super().memory(model, limits)
        dtype = self.dtype(model)
        if not (model.tie_embeddings and can_pack(TORCH_DTYPES[dtype])):
            return plan
        return replace(plan, weights=plan.weights + model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype])

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        super().load(model, weights, progress)
        if can_pack(self._dtype):
            pack_params(self.params, model)

    def pick_dtype(self, model: ModelSpec) -> str:
        """float32, except for bfloat16 checkpoints on processors that multiply bfloat16.

        Measured with avx512_bf16, torch 2.13: bfloat16 products are 4 to 5 times as fast as float32 ones, float16
        ones 4 times slower; without such instructions bfloat16 is emulated and slower than float32 as well.
        """
        if model.dtype == "bfloat16" and cpu_info().native_bfloat16:
            return "bfloat16"
        return "float64" if model.dtype == "float64" else "float32"
