"""The GGUF container: metadata and tensors of a memory-mapped file, every length checked before it is used.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and 3 are read.
Block sizes and type numbers come from the gguf package. Its own reader is not used: on a damaged file it can
loop for 2^64 rounds, and a vocabulary takes it seconds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelError

SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
AGAIN = "The file is damaged or cut short; download it again"


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in the file.

    Attributes:
        type: how its blocks are packed.
        shape: [rows, columns] order, the reverse of the file's.
        offset: first byte, from the start of the file.
        row_bytes: bytes of one row (the last axis).
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, list of str, or a NumPy array.
        tensors: name -> place.

    Raises:
        ModelError: the file cannot be read, is not GGUF, or breaks a rule of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            if self._size < 24:
                raise self._error(f"is {self._size} bytes long, too short for a GGUF file")
            self._bytes = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        self._view = self._bytes.data
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._parse()

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. {AGAIN}.")

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes as stored, uint8 [..., row_bytes]: a view of the file."""
        count = math.prod(tensor.shape[:-1]) * tensor.row_bytes
        data = self._bytes[tensor.offset : tensor.offset + count].view(np.ndarray)
        return data.reshape(*tensor.shape[:-1], tensor.row_bytes)

    def _parse(self) -> None:
        if bytes(self._take(4)) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it does not start with the letters GGUF.")
        version = self._number("<u4")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.path} is a big-endian GGUF file. Convert it with gguf_convert_endian.py.")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; versions 2 and 3 can be read. Convert it anew.")
        tensor_count, field_count = self._number("<u8"), self._number("<u8")
        # No loop needs a bound of its own: every round takes bytes, and the file has an end.
        for _ in range(field_count):
            key = self._string()
            if key in self.metadata:
                raise self._error(f"the metadata key {key} stands twice")
            self.metadata[key] = self._value(self._number("<u4"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, but a power of two is needed")
        places = [self._tensor_info() for _ in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in places:
            if name in self.tensors:
                raise self._error(f"tensor {name} stands twice")
            self.tensors[name] = self._place(name, kind, shape, start + offset)

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > self._size:
            raise self._error(f"it ends at byte {self._size} in the middle of its header")
        taken = self._view[self._at : end]
        self._at = end
        return taken

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0].item()

    def _string(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"a text before byte {self._at} is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._error(f"a metadata value before byte {self._at} has the unknown type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        if kind not in SCALARS:
            raise self._error(f"a metadata array before byte {self._at} has the unsupported element type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("<u4")
        if dimensions > MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
        shape = tuple(self._number("<u8") for _ in range(dimensions))
        return name, self._number("<u4"), shape[::-1], self._number("<u8")

    def _place(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        try:
            tensor_type = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the unknown type {kind}. Convert the model to a common type such as "
                "Q8_0 or Q4_K, or upgrade the gguf package."
            ) from error
        if not shape or 0 in shape or shape[-1] % block:
            raise self._error(f"tensor {name} has shape {list(shape)}, which {tensor_type.name} cannot have")
        row_bytes = shape[-1] // block * block_bytes
        if offset + math.prod(shape[:-1]) * row_bytes > self._size:
            raise self._error(f"tensor {name} ends beyond the file's {self._size} bytes")
        return GGUFTensor(tensor_type, shape, offset, row_bytes)
