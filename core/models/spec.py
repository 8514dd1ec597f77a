"""A decoder as data: what a model family declares, and all that the forward pass and a backend know of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class WeightFormat(NamedTuple):
    """How a checkpoint keeps a matrix of few bits a number: a weight is number × scale (+ least).

    Attributes:
        name: the checkpoint's name for it, such as "Q4_1".
        bits: 8 (from -128 to 127) or 4 (from 0 to 15).
        group: neighbours in a row that share a scale.
        least: whether they also share a least value, which is added.
    """

    name: str
    bits: int
    group: int
    least: bool


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), half-split ("NeoX") layout.

    Attributes:
        inv_freq: the head_dim / 2 angular frequencies in radians per position, scaling already applied.
        attention_factor: multiplies cos and sin (1 except for scalings such as YaRN).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with pre-norm RMSNorm blocks, grouped-query attention and a gated MLP.

    Attributes:
        family: the name of the family that declared it, for messages.
        vocab_size: rows of the embedding and of the logits.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; num_heads is a multiple of it.
        head_dim: width of one head.
        intermediate_size: width of the MLP.
        norm_eps: epsilon of RMSNorm.
        rope: rotary frequencies.
        max_position: context length in tokens that the model was made for.
        activation: of the gated MLP: "silu", "gelu" or "gelu_tanh".
        qkv_bias, o_bias, mlp_bias: whether those linear layers have a bias.
        tie_embeddings: whether the logits reuse the embedding matrix.
        sliding_window: per layer, how many last tokens (itself included) a token attends to; None is all.
        dtype: the checkpoint's dtype, "float32", "bfloat16" or "float16".
        eos_token_ids: tokens that end a sequence.
        bos_token_id: the token a text starts with, where there is one.
        weight_formats: the matrices that the checkpoint keeps in few bits: (path, format) each. A backend may compute
            on them as they are; to others they are float32.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_window: tuple[int | None, ...] = field(default=())
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    weight_formats: tuple[tuple[str, WeightFormat], ...] = ()

    def __post_init__(self) -> None:
        if not self.sliding_window:
            object.__setattr__(self, "sliding_window", (None,) * self.num_layers)

    @property
    def freeable_window(self) -> int | None:
        """The window beyond which no layer looks, in tokens: KV blocks before it can be freed. None: no such."""
        windows = [w for w in self.sliding_window if w is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with before the softmax."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model.

    Attributes:
        path: where it stands in the parameter tree, for example "embed" or "layers.3.q".
        shape: its full shape, before any sharding; linear weights are [out_features, in_features].
        kind: "linear", "embedding", "norm", "bias" or "table" (computed, not in the checkpoint).
        shard: how tensor parallelism splits it: "column" (first axis), "row" (last axis), "vocab" (first
            axis, over the vocabulary) or None (replicated).
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    shard: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def layer_params(model: ModelSpec, layer: int) -> Iterator[ParamSpec]:
    """The parameters of one decoder layer, in the order in which the forward pass reads them."""
    at, hidden, mlp = f"layers.{layer}.", model.hidden_size, model.intermediate_size
    q_out, kv_out = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def linear(name: str, out: int, inp: int, bias: bool, shard: str) -> Iterator[ParamSpec]:
        yield ParamSpec(at + name, (out, inp), "linear", shard)
        if bias:
            yield ParamSpec(at + name + "_bias", (out,), "bias", "column" if shard == "column" else None)

    yield ParamSpec(at + "attn_norm", (hidden,), "norm")
    yield from linear("q", q_out, hidden, model.qkv_bias, "column")
    yield from linear("k", kv_out, hidden, model.qkv_bias, "column")
    yield from linear("v", kv_out, hidden, model.qkv_bias, "column")
    yield from linear("o", hidden, q_out, model.o_bias, "row")
    yield ParamSpec(at + "mlp_norm", (hidden,), "norm")
    yield from linear("gate", mlp, hidden, model.mlp_bias, "column")
    yield from linear("up", mlp, hidden, model.mlp_bias, "column")
    yield from linear("down", hidden, mlp, model.mlp_bias, "row")


def model_params(model: ModelSpec) -> Iterator[ParamSpec]:
    """Every parameter of the model. Loaders fill exactly these, `memory()` counts exactly these."""
    yield ParamSpec("embed", (model.vocab_size, model.hidden_size), "embedding", "vocab")
    yield ParamSpec("rope_inv_freq", (model.head_dim // 2,), "table")
    for layer in range(model.num_layers):
        yield from layer_params(model, layer)
    yield ParamSpec("norm", (model.hidden_size,), "norm")
    if not model.tie_embeddings:
        yield ParamSpec("lm_head", (model.vocab_size, model.hidden_size), "linear", "vocab")


def weight_bytes(model: ModelSpec, dtype: str) -> int:
    """Bytes that the parameters take when each is stored in dtype (the rotary table is always float32)."""
    return sum(p.size * (4 if p.kind == "table" else DTYPE_BYTES[dtype]) for p in model_params(model))
