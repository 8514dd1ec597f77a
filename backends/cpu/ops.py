"""`TorchOps` with linear layers through oneDNN where the weights are packed for it."""

from __future__ import annotations

from typing import Any

import torch

from ..torch.ops import TorchOps
from .onednn import TiedEmbedding, packed_linear

Tensor = torch.Tensor


class CpuOps(TorchOps):
    """Takes packed and plain weights."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.is_mkldnn:
            return packed_linear(x, weight, bias)
        return super().linear(x, weight, bias)

    def embed(self, table: Any, token_ids: Tensor) -> Tensor:
        return super().embed(table.table if isinstance(table, TiedEmbedding) else table, token_ids)

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        return super().logits(x, weight.packed if isinstance(weight, TiedEmbedding) else weight)
