"""Writes small GGUF files for tests, with the gguf package's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}


def interleave_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: in each head, row j of both halves stand side by side."""
    out = np.empty_like(rows)
    width = len(rows) // heads
    for head in range(heads):
        for j in range(width // 2):
            for half in range(2):
                out[head * width + 2 * j + half] = rows[head * width + half * (width // 2) + j]
    return out


def gguf_name(hf: str) -> str:
    """The GGUF name of a Hugging Face tensor, by the gguf package's own table."""
    base, _, suffix = hf.rpartition(".")
    name = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8).get_name(base)
    assert name is not None
    return f"{name}.{suffix}"


def write_gguf(
    path: Path,
    state: Mapping[str, np.ndarray],
    *,
    arch: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Writes a model as llama.cpp's converter would.

    Args:
        path: where to.
        state: Hugging Face names -> float32 values; matrices are stored as `kind`, vectors as F32.
        arch: "llama" or "qwen2".
        kind: how to store matrices; those in `raw` are stored as their bytes.
        raw: Hugging Face names -> blocks of `kind`.
        metadata: further keys, str, bool, int, float or lists.
        drop: metadata keys to leave out.
    """
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        f"{arch}.block_count": TINY["num_hidden_layers"],
        f"{arch}.context_length": TINY["max_position_embeddings"],
        f"{arch}.embedding_length": TINY["hidden_size"],
        f"{arch}.feed_forward_length": TINY["intermediate_size"],
        f"{arch}.attention.head_count": TINY["num_attention_heads"],
        f"{arch}.attention.head_count_kv": TINY["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }
    for key, value in {**keys, **(metadata or {})}.items():
        if key not in drop:
            add_value(writer, key, value)
    for name, values in state.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = TINY["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = interleave_halves(values, heads)
        if raw and name in raw:
            blocks = raw[name]
            if ".q_proj." in name or ".k_proj." in name:
                blocks = interleave_halves(blocks, heads) if arch == "llama" else blocks
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
        elif values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
