"""The compiled library: its functions, over addresses of torch tensors.

The structs and signatures are those of `weights.h`, `attention.h`, `layer.h` and `api.cpp`; ABI says whether a library
was built from the same ones.
"""

from __future__ import annotations

import ctypes as C  # noqa: N812
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ABI = 4
SPINS = 5000
"""Looks for work before an idle thread sleeps: about 100 microseconds, more than the pause between two kernels."""


class Weight(C.Structure):
    """A packed matrix [n, k]."""

    _fields_ = (
        ("format", C.c_int32), ("n", C.c_int32), ("k", C.c_int32), ("group", C.c_int32),
        ("data", C.c_void_p), ("scales", C.c_void_p), ("bias", C.c_void_p),
    )  # fmt: skip


class Model(C.Structure):
    """What the kernels know of a model."""

    _fields_ = (
        *((name, C.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "activation")),
        ("eps", C.c_float), ("scale", C.c_float),
    )  # fmt: skip


class Layer(C.Structure):
    """A layer's parameters."""

    _fields_ = (
        ("attn_norm", C.c_void_p), ("qkv", Weight * 3), ("out", Weight),
        ("mlp_norm", C.c_void_p), ("gate_up", Weight), ("down", Weight),
    )  # fmt: skip


class Cache(C.Structure):
    """A layer's KV cache."""

    _fields_ = (
        *((name, C.c_int32) for name in ("format", "kv_heads", "head_dim", "block_size")),
        ("keys", C.c_void_p), ("values", C.c_void_p),
    )  # fmt: skip


class Step(C.Structure):
    """A step's arrays."""

    _fields_ = (
        *((name, C.c_int32) for name in ("tokens", "sequences", "blocks")),
        *((name, C.c_void_p) for name in ("query_start", "seq_lens", "block_tables", "slots", "cos", "sin")),
    )  # fmt: skip


class Sampling(C.Structure):
    """Rows' sampling fields."""

    _fields_ = tuple((name, C.c_void_p) for name in ("temperature", "seed", "position", "top_k", "top_p", "min_p"))


_P, _I, _L = C.c_void_p, C.c_int32, C.c_int64
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "abi": (_I, ()),
    "lanes": (_I, ()),
    "create": (_P, (_I, _I)),
    "destroy": (None, (_P,)),
    "data_bytes": (_L, (_P,)),
    "scale_bytes": (_L, (_P,)),
    "activation_bits": (_I, (_P,)),
    "pack": (None, (_P, _P, _L, _I, _L, _P, _I)),
    "pack_numbers": (None, (_P, _P, _L, _I, _L, _P, _P, _P)),
    "rows": (None, (_P, _P, _P, _I, _P)),
    "norm": (None, (_P, _P, _P, _I, _I, C.c_float, _P)),
    "linear": (None, (_P, _P, _P, _I, _P)),
    "plan": (None, (_P, _P, _P, _I, _I)),
    "write_cache": (None, (_P, _P, _P, _I, _P, _P)),
    "attention": (None, (_P, _P, _P, _P, _I, _P, _P)),
    "attention_block": (None, (_P, _P, _P, _P, _P, _I, _P, _P)),
    "mlp_block": (None, (_P, _P, _P, _I, _P, _P)),
    "draw": (None, (_P, _P, _P, _L, _I, _I, _P)),
    "gumbel": (None, (_P, _P, _P, _I, _I, _P)),
    "decoder": (None, (_P, _P, _P, _P, _P, _I, _P, _P)),
}


class Library:
    """A loaded library with a team of threads.

    Attributes:
        variant: which of `variants.VARIANTS` it is.
        lanes: float32 numbers in a register.
        panel: columns of a product that are computed together.
    """

    def __init__(self, variant: str, path: Path, threads: int) -> None:
        self.variant = variant
        self._library = C.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"octavo_{name}")
            function.restype, function.argtypes = result, arguments
        if self._library.octavo_abi() != ABI:
            raise ImportError(f"{path} was built from other sources than this code: install the package again")
        self.lanes = self._library.octavo_lanes()
        self.panel = 2 * self.lanes
        self._engine = self._library.octavo_create(threads, SPINS)

    def __getattr__(self, name: str) -> Any:
        """A function over this library's threads."""
        function, engine = getattr(self._library, f"octavo_{name}"), self._engine

        def call(*arguments: Any) -> None:
            function(engine, *arguments)

        self.__dict__[name] = call
        return call

    def sizes(self, weight: Weight) -> tuple[int, int]:
        """Bytes of a packed matrix and of its scales."""
        return self._library.octavo_data_bytes(C.byref(weight)), self._library.octavo_scale_bytes(C.byref(weight))

    def activation_bits(self, weight: Weight) -> int:
        """To how many bits activations are rounded in products with a matrix: 32, 16 (bfloat16) or 8."""
        return self._library.octavo_activation_bits(C.byref(weight))

    def close(self) -> None:
        """Ends the threads."""
        if self._engine:
            self._library.octavo_destroy(self._engine)
            self._engine = None


def address(tensor: torch.Tensor) -> int:
    """Of a contiguous tensor's first number."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
