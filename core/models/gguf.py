"""Models from a GGUF file (llama.cpp's format): the ModelSpec from its metadata, and its weights.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors are read one at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gguf import dequantize
from gguf.constants import GGMLQuantizationType as Type

from ..errors import ModelError
from . import gguf_numbers
from .config import MAX_DIMENSION, Config
from .families import family_for_gguf
from .gguf_file import GGUFFile
from .rope import divide_by_factors
from .spec import ModelSpec, ParamSpec, WeightFormat, model_params
from .weights import HostTensor, QuantizedTensor

NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "blk.{i}.attn_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "mlp_norm": "blk.{i}.ffn_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
}
FLOATS = {
    Type.F64: ("float64", "<f8"),
    Type.F32: ("float32", "<f4"),
    Type.F16: ("float16", "<f2"),
    Type.BF16: ("bfloat16", "<u2"),
}
# Our config.json field -> the key after "{arch}."
REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}


def checkpoint_name(path: str) -> str:
    """The GGUF name of one of our parameter paths, such as "layers.3.q_bias"."""
    *head, name = path.split(".")
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    return NAMES[name.removesuffix("_bias")].format(i=head[-1] if head else "") + suffix


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """The model that a GGUF file holds.

    The spec's dtype is that of the attention weights: "float32" where they are quantized, since that is what
    dequantizing gives.

    Raises:
        ModelError: the architecture or one of its features is not supported, or metadata is missing.
    """
    where = f"{file.path} (metadata)"
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{where}: general.architecture is missing; the file does not hold a language model.")
    family = family_for_gguf(arch, str(file.path))
    if _uniform(file, "split.count", 1) not in (0, 1):
        raise ModelError(f"{file.path} is one of several parts. Join them with llama-gguf-split --merge.")
    if _uniform(file, f"{arch}.expert_count", 0):
        raise ModelError(f"{where}: {arch}.expert_count is set, but a mixture of experts is not supported.")
    config = _config(file, arch)
    layers = config["num_hidden_layers"]
    # Before anything is built per layer: a damaged count must not ask for billions of layers.
    if f"blk.{layers - 1}.attn_norm.weight" not in file.tensors or f"blk.{layers}.attn_norm.weight" in file.tensors:
        raise ModelError(f"{where}: {arch}.block_count is {layers}, but the tensors are of another number of layers.")
    spec = family.spec(config, where)
    rotated = _uniform(file, f"{arch}.rope.dimension_count", spec.head_dim)
    if rotated != spec.head_dim or _uniform(file, f"{arch}.attention.value_length", spec.head_dim) != spec.head_dim:
        raise ModelError(
            f"{where}: heads are {spec.head_dim} wide, but {arch}.rope.dimension_count or attention.value_length "
            "differs, which is not supported."
        )
    rope = spec.rope
    if "rope_freqs.weight" in file.tensors:
        rope = divide_by_factors(rope, _read(file, "rope_freqs.weight", (spec.head_dim // 2,)).float32())
    window_key = f"{arch}.attention.sliding_window"
    window = Config({window_key: _uniform(file, window_key) or None}, where).optional_count(window_key)
    first = file.tensors.get("blk.0.attn_q.weight")
    spec = replace(
        spec,
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_window=(window,) * layers,
        dtype=FLOATS[first.type][0] if first and first.type in FLOATS else "float32",
    )
    formats = {p.path: _format_of(file, p) for p in model_params(spec) if p.kind in ("linear", "embedding")}
    return replace(spec, weight_formats=tuple((path, f) for path, f in formats.items() if f))


def _format_of(file: GGUFFile, param: ParamSpec) -> WeightFormat | None:
    """How a matrix is kept, where that can be computed on."""
    tensor = file.tensors.get(checkpoint_name(param.path))
    return None if tensor is None else gguf_numbers.FORMATS.get(tensor.type)


def _config(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The metadata in config.json's spelling."""
    config: dict[str, Any] = {}
    for field, key in {**REQUIRED, **OPTIONAL}.items():
        config[field] = _uniform(file, f"{arch}.{key}")
        if field in REQUIRED and config[field] is None:
            raise ModelError(f"{file.path}: the metadata key {arch}.{key} is missing. Convert the model anew.")
    layers = config["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers < MAX_DIMENSION:
        raise ModelError(f"{file.path}: {arch}.block_count is {layers!r}, but a number of layers is needed.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing; the file does not hold a whole model.")
    # The embedding has a row for every token, padding included, which metadata may not count.
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    ids = [_uniform(file, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(i for i in ids if i is not None))
    config["bos_token_id"] = _uniform(file, "tokenizer.ggml.bos_token_id")
    scaling = _uniform(file, f"{arch}.rope.scaling.type", "none")
    factor = _uniform(file, f"{arch}.rope.scaling.factor", _uniform(file, f"{arch}.rope.scale_linear", 0.0))
    if scaling != "none" or factor:
        config["rope_scaling"] = {
            "rope_type": "linear" if scaling == "none" else scaling,
            "factor": factor,
            "original_max_position_embeddings": _uniform(file, f"{arch}.rope.scaling.original_context_length"),
            "beta_fast": _uniform(file, f"{arch}.rope.scaling.yarn_beta_fast"),
            "beta_slow": _uniform(file, f"{arch}.rope.scaling.yarn_beta_slow"),
        }
    return config


def _uniform(file: GGUFFile, key: str, default: Any = None) -> Any:
    """A scalar of the metadata. An array with one value per layer is taken where all are equal."""
    value = file.metadata.get(key, default)
    if isinstance(value, np.ndarray):
        if value.size == 0 or (value != value[0]).any():
            raise ModelError(f"{file.path}: {key} differs between layers, which is not supported.")
        value = value[0].item()
    if isinstance(value, list):
        raise ModelError(f"{file.path}: {key} is a list, but one value is needed.")
    return value


def _read(file: GGUFFile, name: str, shape: tuple[int, ...]) -> HostTensor:
    """One tensor: float types as stored, others as numbers and scales, or dequantized to float32."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{file.path}: tensor {name} is missing; the file does not hold a whole model.")
    if tensor.shape != shape:
        raise ModelError(f"{file.path}: tensor {name} has shape {list(tensor.shape)}, but {list(shape)} is needed.")
    rows = file.raw(tensor)
    if tensor.type in FLOATS:
        dtype, stored = FLOATS[tensor.type]
        if rows.ctypes.data % np.dtype(stored).itemsize:  # array libraries assume aligned memory
            rows = rows.copy()
        return HostTensor(rows.view(stored).reshape(shape), dtype)
    if tensor.type in gguf_numbers.FORMATS and len(shape) == 2:
        return gguf_numbers.unpack(rows, tensor.type)
    try:
        # A damaged scale may be infinite; the values are then wrong, but that is no reason for a warning per block.
        with np.errstate(all="ignore"):
            values = dequantize(rows, tensor.type)
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: tensor {name} is stored as {tensor.type.name}, which the gguf package cannot dequantize. "
            "Use another quantization of the model, such as Q8_0 or Q4_K."
        ) from error
    return HostTensor(values.astype(np.float32, copy=False).reshape(shape), "float32")


class GGUFSource:
    """A GGUF file as a source of weights.

    Args:
        file: the open file.
        spec: the model it holds, from `gguf_spec`.
    """

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        # llama.cpp rotates neighbouring pairs in "llama" models, so its converter interleaves the two halves of
        # each head of q and k. Ours, as Hugging Face's, are the halves themselves.
        self._interleaved = file.metadata.get("general.architecture") == "llama"

    def read(self, param: ParamSpec) -> HostTensor:
        """The parameter's values, in param.shape: views where the file holds floats, else a QuantizedTensor or float32.

        Raises:
            ModelError: the file lacks it, has it in another shape, or in a type that cannot be read.
        """
        host = _read(self._file, checkpoint_name(param.path), param.shape)
        order = self._row_order(param)
        if order is None:
            return host
        return host.take(order) if isinstance(host, QuantizedTensor) else HostTensor(host.data[order], host.dtype)

    def _row_order(self, param: ParamSpec) -> np.ndarray | None:
        """The file's row for each of ours; None where they are the same."""
        name = param.path.rpartition(".")[2].removesuffix("_bias")
        if not self._interleaved or name not in ("q", "k"):
            return None
        order = np.arange(param.shape[0]).reshape(-1, self._spec.head_dim // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)
