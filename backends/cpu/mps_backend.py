"""The backend for Apple Silicon itself; imports torch."""

from __future__ import annotations

import torch

from ...core.backend import BackendConfig, Capabilities
from ..torch.backend import TorchBackend

DTYPES = ("float32", "bfloat16", "float16")  # Metal has no float64


class MpsBackend(TorchBackend):
    """Eager torch on Metal. Memory is shared with the host."""

    default_utilization = 0.6
    default_cache_share = 0.3

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config, torch.device("mps"))

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, kv_dtypes=DTYPES, block_sizes=(16, 8, 32, 64, 128))

    def device_memory(self) -> tuple[int, int]:
        total = torch.mps.recommended_max_memory()
        return total, max(total - torch.mps.driver_allocated_memory(), 0)
