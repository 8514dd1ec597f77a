"""Dtype names, and host tensors as torch tensors."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from ...core.models.weights import HostTensor

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def as_torch(value: HostTensor) -> torch.Tensor:
    """A CPU tensor over the host tensor's own memory. It may be a read-only file: copy, never write."""
    bits = value.data.view(np.int16) if value.dtype == "bfloat16" else value.data
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if value.dtype == "bfloat16" else tensor
