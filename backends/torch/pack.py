"""Weights as `TorchOps` wants them: projections that read the same input are one matrix."""

from __future__ import annotations

from typing import Any

import torch

_PACKED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def pack_layer(layer: dict[str, Any]) -> None:
    """Replaces q, k, v by "qkv" and gate, up by "gate_up", biases likewise. In place: one layer is held twice."""
    for packed, parts in _PACKED.items():
        for suffix in ("", "_bias"):
            if parts[0] + suffix in layer:
                layer[packed + suffix] = torch.cat([layer.pop(part + suffix) for part in parts])
