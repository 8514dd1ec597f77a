"""The forward pass's operations through the compiled kernels. Activations are float32 whatever the weights are."""

from __future__ import annotations

import ctypes as C  # noqa: N812
from typing import Any

import torch

from ....core.backend import CacheSpec
from ....core.models.spec import DTYPE_BYTES, ModelSpec
from ....core.ops import StepContext
from ....core.step import Cache, SamplerShape, SamplingInput, StepInput, StepShape
from ...torch.ops import TorchOps
from . import library as native
from .library import Library, address
from .memory import zeros
from .weights import FORMATS, QUANTIZED, PackedWeight

Tensor = torch.Tensor
KV_FORMATS = FORMATS | {"int8": QUANTIZED["int8"]}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class LayerCache:
    """One layer's cache, a row of bytes for each block.

    Attributes:
        keys: [blocks, K, D, block size], and in int8 a float32 scale for each slot behind each head.
        values: [blocks, K, block size, D rounded up to whole registers], and scales likewise.
        block_size: tokens of a block.
        struct: what the kernels are given.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, lanes: int) -> None:
        # Pages are taken when blocks are first used: by the thread that uses them, and not all before the first token.
        self.keys, self.values = (
            zeros(num_blocks * size).view(num_blocks, size) for size in layer_block_bytes(spec, lanes)
        )
        self.block_size = spec.block_size
        self.struct = native.Cache(
            KV_FORMATS[spec.dtype], spec.num_kv_heads, spec.head_dim, spec.block_size,
            address(self.keys), address(self.values),
        )  # fmt: skip


def layer_block_bytes(spec: CacheSpec, lanes: int) -> tuple[int, int]:
    """What the keys and the values of a block take in one layer."""
    wide = -(-spec.head_dim // lanes) * lanes
    scale = 4 if spec.dtype == "int8" else 0
    of = lambda width: spec.num_kv_heads * spec.block_size * (width * DTYPE_BYTES[spec.dtype] + scale)  # noqa: E731
    return of(spec.head_dim), of(wide)


class Plan:
    """What the layers of a step share.

    Attributes:
        model, step: for the kernels.
    """

    def __init__(self, model: ModelSpec, inputs: StepInput) -> None:
        m = model
        self.model = native.Model(
            m.hidden_size, m.num_heads, m.num_kv_heads, m.head_dim, m.intermediate_size, _ACTIVATIONS[m.activation],
            m.norm_eps, m.scale,
        )  # fmt: skip
        self._inputs = inputs  # the struct has addresses only
        tables = inputs.block_tables
        self.step = native.Step(inputs.token_ids.shape[0], tables.shape[0], tables.shape[1])
        for name, array in (
            ("query_start", inputs.query_start), ("seq_lens", inputs.seq_lens), ("block_tables", tables),
            ("slots", inputs.slot_mapping),
        ):  # fmt: skip
            setattr(self.step, name, address(array))


class NativeOps(TorchOps):
    """Kernels of the compiled library; what it lacks is torch's."""

    def __init__(self, library: Library) -> None:
        super().__init__(torch.device("cpu"))
        self._library = library
        # For which step and window the library, which keeps one at a time, has cut the attention.
        self._cut_for: tuple[Plan | None, int] = (None, 0)
        # Layers and caches, and arrays of their structs.
        self._decoder: tuple[Any, ...] | None = None

    def plan(self, model: ModelSpec, shape: StepShape, inputs: StepInput, cache: Cache) -> Any:
        return Plan(model, inputs)

    def _cut(self, plan: Plan, cache: LayerCache, window: int | None) -> int:
        """The window as the kernels take it; cuts the attention if step or window are others than before."""
        number = window or 0
        if self._cut_for != (plan, number):
            self._cut_for = (plan, number)
            self._library.plan(C.byref(plan.model), C.byref(plan.step), cache.block_size, number)
        return number

    # ------------------------------------------------------------------ the paged cache

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor, ctx: StepContext) -> LayerCache:
        k, v = k.float().contiguous(), v.float().contiguous()
        slots = ctx.inputs.slot_mapping
        self._library.write_cache(C.byref(cache.struct), address(slots), len(slots), address(k), address(v))
        return cache

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, ctx: StepContext, window: int | None
    ) -> Tensor:
        wide = q.float().contiguous()
        out = torch.empty_like(wide)
        number = self._cut(ctx.plan, cache, window)
        step, model = C.byref(ctx.plan.step), C.byref(ctx.plan.model)
        self._library.attention(model, step, C.byref(cache.struct), number, address(wide), address(out))
        return out.to(q.dtype)

    # ------------------------------------------------------------------ composites

    def decoder(self, x: Tensor, layers: Any, caches: Any, ctx: StepContext) -> Any:
        """All layers in one call: what Python adds to each would be felt in a decode step."""
        count, plan = len(layers), ctx.plan
        if self._decoder is None or self._decoder[0] is not layers or self._decoder[1] is not caches:
            windows = (C.c_int32 * count)(*(w or 0 for w in ctx.model.sliding_window))
            structs = (native.Layer * count)(*(layer.struct for layer in layers))
            self._decoder = (layers, caches, structs, (native.Cache * count)(*(c.struct for c in caches)), windows)
        plan.step.cos, plan.step.sin = address(ctx.cos), address(ctx.sin)
        self._cut_for = (None, 0)
        out = x.clone()
        self._library.decoder(C.byref(plan.model), *self._decoder[2:], count, C.byref(plan.step), address(out))
        return out, caches

    def attention_block(self, x: Tensor, layer: Any, cache: Any, ctx: StepContext, window: int | None) -> Any:
        plan: Plan = ctx.plan
        plan.step.cos, plan.step.sin = address(ctx.cos), address(ctx.sin)
        number = self._cut(plan, cache, window)
        out = torch.empty_like(x)
        arguments = (C.byref(plan.model), C.byref(layer.struct), C.byref(plan.step), C.byref(cache.struct), number)
        self._library.attention_block(*arguments, address(x), address(out))
        return out, cache

    def mlp_block(self, x: Tensor, layer: Any, ctx: StepContext) -> Tensor:
        out = torch.empty_like(x)
        model = C.byref(ctx.plan.model)
        self._library.mlp_block(model, C.byref(layer.struct), x.shape[0], address(x), address(out))
        return out

    # ------------------------------------------------------------------ pieces

    def embed(self, table: Any, token_ids: Tensor) -> Tensor:
        if not isinstance(table, PackedWeight):
            return super().embed(table, token_ids)
        out = torch.empty(len(token_ids), table.shape[1])
        ids = token_ids.to(torch.int32).contiguous()
        self._library.rows(table.reference, address(ids), len(ids), address(out))
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return super().linear(x, weight, bias)
        wide = x.float().contiguous()
        out = torch.empty(len(wide), weight.shape[0])
        self._library.linear(weight.reference, address(wide), len(wide), address(out))
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or x.dim() != 2:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.norm(address(x), address(weight), *x.shape, eps, address(out))
        return out

    # ------------------------------------------------------------------ sampling

    def draw(self, shape: SamplerShape, scores: Tensor, s: SamplingInput) -> Tensor:
        if scores.dtype != torch.float32 or scores.stride(1) != 1:
            return super().draw(shape, scores, s)
        fields = () if shape.greedy else ("temperature", "seed", "position")
        fields += ("top_k", "top_p", "min_p") if shape.filters and not shape.greedy else ()
        struct = native.Sampling(**{name: address(getattr(s, name)) for name in fields})
        tokens = torch.empty(len(scores), dtype=torch.int32)
        rows, size = scores.shape
        self._library.draw(C.byref(struct), scores.data_ptr(), scores.stride(0), rows, size, address(tokens))
        return tokens

    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        out = torch.empty(len(position), vocab_size)
        self._library.gumbel(address(seed), address(position), len(position), vocab_size, address(out))
        return out
