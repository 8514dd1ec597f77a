"""Weights from a directory of safetensors files, memory-mapped.

The format: an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
tensors' bytes, without gaps (https://huggingface.co/docs/safetensors). It is read here rather than with the
safetensors package because that package's NumPy side has no bfloat16 and copies what it returns.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .config import read_json
from .families import Family
from .spec import ParamSpec
from .weights import HostTensor

# safetensors dtype -> (ours, how NumPy views the bytes)
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F64": ("float64", np.dtype("<f8")),
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype("<u2")),
}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2,
              "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "The file is damaged or cut short; download it again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a file: its dtype in the format's spelling, shape, and first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """One safetensors file, mapped into memory.

    Attributes:
        path: the file.
        entries: what it holds, by name.

    Raises:
        ModelError: the file cannot be read or breaks a rule of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(8)
                length = int.from_bytes(start, "little")
                if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                    raise ModelError(f"{path}: the header is longer than the file ({size} bytes). {AGAIN}.")
                header = file.read(length)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        self.entries = self._parse(header, size)
        self._bytes = np.memmap(path, np.uint8, "r")

    def _parse(self, header: bytes, size: int) -> dict[str, TensorEntry]:
        try:
            table = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path}: the header is not valid JSON ({error}). {AGAIN}.") from error
        if not isinstance(table, dict):
            raise ModelError(f"{self.path}: the header is not a JSON object. {AGAIN}.")
        data_start = 8 + len(header)
        entries, extents = {}, []
        for name, fields in table.items():
            if name == "__metadata__":
                continue
            dtype, shape, begin, end = self._fields(name, fields)
            if not 0 <= begin <= end <= size - data_start:
                raise ModelError(f"{self.path}: tensor {name} ends beyond the file ({size} bytes). {AGAIN}.")
            if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
                raise ModelError(
                    f"{self.path}: tensor {name} is {dtype} {list(shape)} but has {end - begin} bytes. {AGAIN}."
                )
            entries[name] = TensorEntry(dtype, shape, data_start + begin)
            extents.append((begin, end, name))
        at = 0
        for begin, end, name in sorted(extents):
            if begin != at:
                raise ModelError(f"{self.path}: tensor {name} overlaps another, or leaves a gap. {AGAIN}.")
            at = end
        if at != size - data_start:
            raise ModelError(f"{self.path}: {size - data_start - at} bytes at the end belong to no tensor. {AGAIN}.")
        return entries

    def _fields(self, name: str, fields: Any) -> tuple[str, tuple[int, ...], int, int]:
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in [*shape, begin, end])
        except (TypeError, KeyError, ValueError) as error:
            raise ModelError(f"{self.path}: tensor {name} has a malformed entry. {AGAIN}.") from error
        if not whole:
            raise ModelError(f"{self.path}: tensor {name} has a malformed shape or offset. {AGAIN}.")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ModelError(f"{self.path}: tensor {name} has dtype {dtype!r}, which is not known.")
        return dtype, tuple(shape), begin, end

    def read(self, name: str, shape: tuple[int, ...]) -> HostTensor:
        """The tensor, which must be there, have this shape and be floating point; a view where it can be.

        Raises:
            ModelError: it is not so.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: tensor {name} is missing. {AGAIN}, or check that config.json fits it.")
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name} is {entry.dtype}, but only {', '.join(DTYPES)} can be read. "
                "Use a checkpoint in one of these."
            )
        if entry.shape != shape:
            raise ModelError(
                f"{self.path}: tensor {name} has shape {list(entry.shape)}, but config.json asks for {list(shape)}. "
                "Use the config.json that belongs to this checkpoint."
            )
        dtype, numpy_dtype = DTYPES[entry.dtype]
        end = entry.offset + math.prod(shape) * numpy_dtype.itemsize
        data = self._bytes[entry.offset : end].view(np.ndarray).view(numpy_dtype).reshape(shape)
        # Array libraries assume aligned memory; the format does not promise it.
        return HostTensor(data if data.flags.aligned else data.copy(), dtype)


class SafetensorsSource:
    """A checkpoint directory: model.safetensors, or shards with an index. Only headers are read up front.

    Args:
        directory: the checkpoint.
        family: gives the tensors' names.

    Raises:
        ModelError: there is no safetensors checkpoint, a shard is missing, or a file is damaged.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        self._directory = directory
        self._family = family
        self._files = {name: SafetensorsFile(directory / name) for name in self._file_names()}
        self._home = {tensor: file for file in self._files.values() for tensor in file.entries}

    def _file_names(self) -> list[str]:
        if (self._directory / SINGLE).is_file():
            return [SINGLE]
        index = self._directory / INDEX
        if not index.is_file():
            raise ModelError(self._why_none())
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: weight_map is not an object of file names; get the file again.")
        names = sorted(set(weight_map.values()))
        for name in names:
            # A name such as "../x" would read outside of the checkpoint.
            if Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is not the name of a file beside it; get the file again.")
            if not (self._directory / name).is_file():
                raise ModelError(f"{self._directory / name} is missing, but {INDEX} names it; download it.")
        return names

    def _why_none(self) -> str:
        other = sorted(p.name for p in self._directory.glob("*") if p.suffix in (".bin", ".pth", ".pt"))
        found = f"{self._directory} has no {SINGLE} and no {INDEX}"
        if other:
            return (
                f"{found}, only {other[0]}. Octavo does not open pickled checkpoints, which can run code: convert it "
                'with Transformers, model.save_pretrained("DIR", safe_serialization=True), and serve that directory.'
            )
        return f"{found}. Give a directory that holds the model's weights as safetensors."

    @property
    def dtype(self) -> str:
        """The dtype of the embedding, which stands for the checkpoint's where config.json names none."""
        name = self._family.checkpoint_name("embed")
        entry = self._home[name].entries[name] if name in self._home else None
        return DTYPES[entry.dtype][0] if entry and entry.dtype in DTYPES else "float32"

    def read(self, param: ParamSpec) -> HostTensor:
        """The parameter's values, in param.shape: a view of the mapped file.

        Raises:
            ModelError: the checkpoint lacks it, or has it in another shape or dtype.
        """
        name = self._family.checkpoint_name(param.path)
        if name not in self._home:
            hint = "Check that config.json belongs to this checkpoint."
            if param.path == "lm_head":
                hint = 'If the model ties it to the embedding, set "tie_word_embeddings": true in config.json.'
            raise ModelError(f"{self._directory}: tensor {name} is missing from the safetensors files. {hint}")
        return self._home[name].read(name, param.shape)
