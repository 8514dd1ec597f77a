"""GGUF's quantized blocks as numbers, scales and least values: what kernels that compute on them need.

The layouts are those of ggml (`ggml-common.h`, and the gguf package's `quants.py`). A weight is number × scale + least.
"""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from .weights import QuantizedTensor, WeightFormat

FORMATS = {
    Type.Q8_0: WeightFormat("Q8_0", 8, 32, False),
    Type.Q5_0: WeightFormat("Q5_0", 8, 32, False),
    Type.Q6_K: WeightFormat("Q6_K", 8, 16, False),
    Type.Q4_0: WeightFormat("Q4_0", 4, 32, True),
    Type.Q4_1: WeightFormat("Q4_1", 4, 32, True),
    Type.Q4_K: WeightFormat("Q4_K", 4, 32, True),
}
"""Types that can be computed on without dequantizing, and how: 5 and 6 bits become 8."""


def unpack(rows: np.ndarray, kind: Type) -> QuantizedTensor:
    """Blocks as stored, uint8 [N, bytes of a row], of one of FORMATS."""
    count, (size, width) = len(rows), GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(count, -1, width)
    # A damaged scale may overflow; the values are then wrong, but that is no reason for a warning per block.
    with np.errstate(all="ignore"):
        numbers, scales, least = _READERS[kind](blocks)
    return QuantizedTensor(
        FORMATS[kind],
        numbers.reshape(count, blocks.shape[1] * size),
        scales.reshape(count, -1),
        None if least is None else least.reshape(count, -1),
    )


_Parts = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, float32 [N, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """The low halves of some bytes, then the high ones: [..., n] → int8 [..., 2 n]."""
    return np.concatenate([data & 15, data >> 4], axis=-1).view(np.int8)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0), None


def _q5_0(blocks: np.ndarray) -> _Parts:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little").view(np.int8)
    return _nibbles(blocks[..., 6:]) + fifth * np.int8(16) - np.int8(16), _half(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, scale * -8


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> _Parts:
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    # Of eight scales and eight least values, 6 bits each, the first four stand whole, the others in two parts.
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    least = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=-1)
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return numbers, scales * _half(blocks, 0), -(least * _half(blocks, 2))


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    numbers = (_nibbles(low) | (upper << 4).view(np.int8)) - np.int8(32)
    return numbers, blocks[..., 192:208].view(np.int8) * _half(blocks, 208), None


_READERS = {
    Type.Q8_0: _q8_0,
    Type.Q5_0: _q5_0,
    Type.Q6_K: _q6_k,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q4_K: _q4_k,
}
