"""Weights on their way into panels: each is packed as it is read, so no second copy of a model ever exists."""

from __future__ import annotations

import ctypes as C  # noqa: N812
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ....core.errors import ConfigError
from ....core.models.spec import ModelSpec, ParamSpec, WeightFormat, model_params
from ....core.models.weights import HostTensor, QuantizedTensor
from .library import Layer, Library, Weight, address
from .memory import Arena

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2}
QUANTIZED = {"int8": 3, "int4": 4}
"""int8: symmetric, a scale for each row. int4: a scale and a least value for each GROUP numbers of a row."""
GROUP = 32


@dataclass(frozen=True)
class Storage:
    """How matrices are kept.

    Attributes:
        dtype: of matrices that are not quantized.
        quantization: "int8", "int4" or None: what all matrices are rounded to. The embedding and the logits' matrix get
            8 bits in either case.
        kept: by path, the matrices that stay as the checkpoint has them.
    """

    dtype: str
    quantization: str | None = None
    kept: Mapping[str, WeightFormat] = field(default_factory=dict)

    def struct(self, n: int, k: int, end: bool, *paths: str) -> Weight:
        """A matrix [n, k]; `end` for the embedding and the logits' matrix.

        Args:
            paths: the parameters that are in it.

        Raises:
            ConfigError: its rows are not made of whole groups.
        """
        if self.keeps(*paths):
            format = self.kept[paths[0]]
            return Weight(QUANTIZED[f"int{format.bits}"], n, k, format.group)
        if self.quantization is None:
            return Weight(FORMATS[self.dtype], n, k, k)
        if end or self.quantization == "int8":
            return Weight(QUANTIZED["int8"], n, k, k)
        if k % GROUP:
            raise ConfigError(f"--quantization int4 needs widths that are multiples of {GROUP}; this model has {k}.")
        return Weight(QUANTIZED["int4"], n, k, GROUP)

    def keeps(self, *paths: str) -> bool:
        """Whether these parameters stay as they are and can be one matrix, or a single one can."""
        layouts = {(f.bits, f.group) if (f := self.kept.get(path)) else None for path in paths}
        return len(layouts) == 1 and None not in layouts


class PackedWeight:
    """A matrix [n, k] in panels, with room for a bias.

    Args:
        arena: where its memory comes from.

    Attributes:
        struct: what the kernels are given.
    """

    def __init__(self, library: Library, struct: Weight, arena: Arena) -> None:
        self.struct, self.shape = struct, (struct.n, struct.k)
        # Zeros, also where panels reach beyond n.
        self._buffers = [arena.take(size) for size in library.sizes(struct)]
        struct.data, struct.scales = (address(buffer) for buffer in self._buffers)
        self._bias = torch.Tensor()

    @property
    def bias(self) -> torch.Tensor:
        """The bias, float32 [n], of zeros until it is written."""
        if not self._bias.numel():
            self._bias = torch.zeros(self.struct.n)
            self.struct.bias = address(self._bias)
        return self._bias

    @property
    def reference(self) -> Any:
        """For a call."""
        return C.byref(self.struct)


def layer_structs(library: Library, model: ModelSpec, storage: Storage, layer: int) -> dict[str, Weight]:
    """A layer's matrices as they are packed: gate and up as one, and q, k and v, unless they are kept in formats of
    their own."""
    m, width, kv = model, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    q, k, v, o, gate, up, down = (f"layers.{layer}.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    # Panels of gate and up take turns, so both have whole panels.
    mlp = -(-m.intermediate_size // library.panel) * library.panel
    if storage.keeps(q, k, v) or not any(p in storage.kept for p in (q, k, v)):
        attention = {"qkv": storage.struct(width + 2 * kv, m.hidden_size, False, q, k, v)}
    else:
        attention = {p[-1]: storage.struct(n, m.hidden_size, False, p) for p, n in ((q, width), (k, kv), (v, kv))}
    return attention | {
        "o": storage.struct(m.hidden_size, width, False, o),
        "gate_up": storage.struct(2 * mlp, m.hidden_size, False, gate, up),
        "down": storage.struct(m.hidden_size, m.intermediate_size, False, down),
    }


def end_struct(model: ModelSpec, storage: Storage, path: str) -> Weight:
    """The embedding or the logits' matrix."""
    return storage.struct(model.vocab_size, model.hidden_size, True, path)


def weight_bytes(library: Library, model: ModelSpec, storage: Storage) -> int:
    """What all parameters take, packed."""
    matrices = [m for layer in range(model.num_layers) for m in layer_structs(library, model, storage, layer).values()]
    matrices += [
        end_struct(model, storage, path) for path in (("embed",) if model.tie_embeddings else ("embed", "lm_head"))
    ]
    rest = sum(p.size for p in model_params(model) if p.kind in ("norm", "bias", "table"))
    return sum(sum(library.sizes(m)) for m in matrices) + 4 * rest


class LayerWeights:
    """A layer's parameters; `struct` is complete once all of them were placed."""

    def __init__(self, library: Library, model: ModelSpec, storage: Storage, layer: int, arena: Arena) -> None:
        structs = layer_structs(library, model, storage, layer)
        self.weights = {name: PackedWeight(library, struct, arena) for name, struct in structs.items()}
        self.norms: dict[str, torch.Tensor] = {}
        width, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        # Of each checkpoint matrix: where it goes, its first row there, and whether it takes every other panel.
        self.places = {
            "q": ("qkv", 0, 0), "k": ("qkv", width, 0), "v": ("qkv", width + kv, 0), "o": ("o", 0, 0),
            "gate": ("gate_up", 0, 1), "up": ("gate_up", 0, 2), "down": ("down", 0, 0),
        }  # fmt: skip
        if "qkv" not in structs:
            self.places |= {name: (name, 0, 0) for name in ("q", "k", "v")}

    @cached_property
    def struct(self) -> Layer:
        """What the kernels are given."""
        w, norms = self.weights, self.norms
        qkv = (Weight * 3)(*(w[name].struct for name in ("qkv", "q", "k", "v") if name in w))
        return Layer(
            address(norms["attn_norm"]), qkv, w["o"].struct,
            address(norms["mlp_norm"]), w["gate_up"].struct, w["down"].struct,
        )  # fmt: skip


class Packer:
    """`place` for the parameters of one model."""

    def __init__(self, library: Library, model: ModelSpec, storage: Storage) -> None:
        self._library, self._model, self._storage = library, model, storage
        self._arena = Arena()
        self.layers = [LayerWeights(library, model, storage, i, self._arena) for i in range(model.num_layers)]

    def place(self, param: ParamSpec, value: HostTensor) -> Any:
        """Packs a matrix; anything else becomes a float32 tensor."""
        if param.kind == "embedding" or param.path == "lm_head":
            weight = PackedWeight(self._library, end_struct(self._model, self._storage, param.path), self._arena)
            self._pack(weight, value, 0, 0)
            return weight
        if not param.path.startswith("layers."):
            return torch.from_numpy(value.float32().copy())
        _, number, name = param.path.split(".")
        layer = self.layers[int(number)]
        if param.kind == "norm":
            layer.norms[name] = torch.from_numpy(value.float32().copy())
            return layer
        into, first, alternate = layer.places[name.removesuffix("_bias")]
        weight = layer.weights[into]
        if param.kind == "linear":
            self._pack(weight, value, first, alternate)
        else:
            index = np.arange(param.shape[0])
            if alternate:
                panel = self._library.panel
                index = (index // panel * 2 + alternate - 1) * panel + index % panel
            weight.bias[torch.from_numpy(first + index)] = torch.from_numpy(value.float32().copy())
        return layer

    def _pack(self, weight: PackedWeight, value: HostTensor, first: int, alternate: int) -> None:
        format = weight.struct.format
        if isinstance(value, QuantizedTensor) and format in QUANTIZED.values() and self._storage.quantization is None:
            with np.errstate(over="ignore"):  # scales of a damaged file
                scales = value.scales.astype(np.float16)
                least = None if value.least is None else value.least.astype(np.float16)
            numbers = np.ascontiguousarray(value.numbers)
            self._library.pack_numbers(
                weight.reference, first, alternate, len(numbers), numbers.ctypes.data, scales.ctypes.data,
                None if least is None else least.ctypes.data,
            )  # fmt: skip
            return
        data = np.ascontiguousarray(value.data if value.dtype in FORMATS else value.float32())
        kind = FORMATS.get(value.dtype, FORMATS["float32"])
        self._library.pack(weight.reference, first, alternate, data.shape[0], data.ctypes.data, kind)
