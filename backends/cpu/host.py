"""What both CPU backends, torch's kernels and the compiled ones, have of the host."""

from __future__ import annotations

import torch

from ...core.backend import BackendConfig
from ..host import host_memory, host_threads
from ..torch.backend import TorchBackend
from ..torch.ops import TorchOps


class HostBackend(TorchBackend):
    """Torch on the host's processors.

    Args:
        threads: that torch computes with; None: torch's own choice, as far as a control group's quota lets it.
    """

    # The host's memory is not ours alone.
    default_utilization = 0.8
    default_cache_share = 0.1

    def __init__(self, config: BackendConfig, ops: TorchOps, threads: int | None) -> None:
        super().__init__(config, torch.device("cpu"), ops)
        torch.set_num_threads(threads or min(torch.get_num_threads(), host_threads()))

    def device_memory(self) -> tuple[int, int]:
        return host_memory()
