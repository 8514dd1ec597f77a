"""The forward pass's operations on torch tensors."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F  # noqa: N812

from ...core.models.spec import ModelSpec
from ...core.ops import Ops, StepContext
from ...core.step import Cache, StepInput, StepShape
from . import sampling
from .attend import composed, flash, has_flash, merge
from .plan import Chunk, Group, Plan, Tile

Tensor = torch.Tensor


class TorchOps(Ops):
    """Eager torch. Expects parameters packed as in `pack.py`.

    Attributes:
        use_flash: whether torch's fused attention kernel for CPUs is there and used.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(xp)
        self.use_flash = has_flash(device)

    # ------------------------------------------------------------------ the paged cache

    def plan(self, model: ModelSpec, shape: StepShape, inputs: StepInput, cache: Cache) -> Plan:
        return Plan(inputs)

    def write_cache(self, cache: Tensor, k: Tensor, v: Tensor, ctx: StepContext) -> Tensor:
        heads = k.shape[1]
        slots = cache.flatten(1, 2)  # a view
        slots[:heads].index_copy_(1, ctx.plan.slots, k.transpose(0, 1).to(cache.dtype))
        slots[heads:].index_copy_(1, ctx.plan.slots, v.transpose(0, 1).to(cache.dtype))
        return cache

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, ctx: StepContext, window: int | None) -> Tensor:
        plan: Plan = ctx.plan
        scale = ctx.model.scale
        groups = plan.groups(window, cache, q.dtype)
        if groups and groups[0].rows is None:
            return self._decode(q, cache, groups[0], scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[plan.tokens :] = 0
        for group in groups:
            assert group.rows is not None  # only where there is but one group
            out.index_copy_(0, group.rows, self._decode(q.index_select(0, group.rows), cache, group, scale))
        for chunk in plan.chunks:
            part = slice(chunk.start, chunk.stop)
            windowed = window is not None and window < chunk.first + chunk.stop - chunk.start
            if self.use_flash and not windowed:
                out[part] = self._prefill(q[part], k[part], v[part], cache, chunk, plan, scale)
            else:
                self._prefill_masked(q[part], out[part], cache, chunk, plan, scale, window if windowed else None)
        return out

    def _decode(self, q: Tensor, cache: Tensor, group: Group, scale: float) -> Tensor:
        """One query of each of n sequences: [n, H, D] → [n, H, D]."""
        n, heads, width = q.shape
        kv_heads = cache.shape[0] // 2
        queries = q.view(n, kv_heads, heads // kv_heads, width).transpose(0, 1)  # [K, n, G, D]
        several = len(group.tiles) > 1

        def attend(tile: Tile) -> tuple[Tensor, Tensor]:
            kv = _gather(cache, tile.index, q.dtype).view(2 * kv_heads, n, tile.length, width)
            # In 16 bits the fused kernel is slower here, but it keeps the scores in float32.
            if self.use_flash and q.dtype in (torch.float16, torch.bfloat16):
                return flash(queries, kv[:kv_heads], kv[kv_heads:], scale, tile.mask)
            return composed(queries, kv[:kv_heads], kv[kv_heads:], scale, tile.mask, need_lse=several)

        out, lse = attend(group.tiles[0])
        for tile in group.tiles[1:]:
            out, lse = merge(out, lse, *attend(tile))
        return out.transpose(0, 1).reshape(n, heads, width).to(q.dtype)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, chunk: Chunk, plan: Plan, scale: float
    ) -> Tensor:
        """A chunk without a window: its own keys and values as they are, and what is before it tile by tile."""
        kv_heads = k.shape[1]
        queries = q.view(q.shape[0], kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [K, G, n, D]
        out, lse = flash(queries, _shared(k), _shared(v), scale, causal=True)
        for index in plan.context(chunk, cache):
            kv = _gather(cache, index, q.dtype).view(2 * kv_heads, 1, -1, q.shape[2])
            out, lse = merge(out, lse, *flash(queries, kv[:kv_heads], kv[kv_heads:], scale))
        return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)

    def _prefill_masked(
        self, q: Tensor, out: Tensor, cache: Tensor, chunk: Chunk, plan: Plan, scale: float, window: int | None
    ) -> None:
        """Any chunk, from the cache alone: some queries at a time, against all keys that one of them sees."""
        kv_heads = cache.shape[0] // 2
        queries = q.view(q.shape[0], kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [K, G, n, D]
        attend = flash if self.use_flash else composed
        for span in plan.spans(chunk, window, cache, q.dtype):
            kv = _gather(cache, span.index, q.dtype).view(2 * kv_heads, 1, -1, q.shape[2])
            part = slice(span.start, span.stop)
            mixed, _ = attend(queries[:, :, part], kv[:kv_heads], kv[kv_heads:], scale, span.mask)
            out[part] = mixed.permute(2, 0, 1, 3).reshape(out[part].shape)

    # ------------------------------------------------------------------ composites, over packed weights

    def attention_block(self, x: Any, layer: Any, cache: Any, ctx: StepContext, window: int | None) -> tuple[Any, Any]:
        m = ctx.model
        h = self.rms_norm(x, layer["attn_norm"], m.norm_eps)
        qkv = self.linear(h, layer["qkv"], layer.get("qkv_bias")).view(-1, m.num_heads + 2 * m.num_kv_heads, m.head_dim)
        q, k = self.rotary(qkv[:, : -m.num_kv_heads], ctx.cos, ctx.sin).split((m.num_heads, m.num_kv_heads), dim=1)
        v = qkv[:, -m.num_kv_heads :]
        cache = self.write_cache(cache, k, v, ctx)
        out = self.attention(q, k, v, cache, ctx, window).flatten(1)
        return x + self.linear(out, layer["o"], layer.get("o_bias")), cache

    def mlp_block(self, x: Any, layer: Any, ctx: StepContext) -> Any:
        h = self.rms_norm(x, layer["mlp_norm"], ctx.model.norm_eps)
        gate, up = self.linear(h, layer["gate_up"], layer.get("gate_up_bias")).chunk(2, dim=-1)
        h = self.activation(gate, ctx.model.activation).mul_(up)
        return x + self.linear(h, layer["down"], layer.get("down_bias"))

    # ------------------------------------------------------------------ pieces

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == self.wide:
            return F.rms_norm(x, weight.shape, weight, eps)
        # Rounded before it is multiplied with the weight, as the models were trained.
        return F.rms_norm(x.to(self.wide), weight.shape, None, eps).to(x.dtype) * weight

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        return self.linear(x, weight).to(self.wide)  # no copy where they are so already

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :], sin[:, None, :]
        wide = x.to(self.wide)
        a, b = wide[..., :half], wide[..., half:]
        out = torch.empty_like(wide, memory_format=torch.contiguous_format)
        torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin)
        return out.to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if kind == "silu":
            return F.silu(x)
        if kind == "gelu":
            return F.gelu(x)
        if kind == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        raise ValueError(f"unknown activation {kind!r}")

    # ------------------------------------------------------------------ sampling

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, ids = torch.topk(x, k, dim=-1)
        return values, ids.to(torch.int32)

    def scatter(self, x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        row, entry = torch.nonzero(ids >= 0, as_tuple=True)
        out = x.clone()
        out[row, ids[row, entry].long()] = values[row, entry]
        return out

    def threshold(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return sampling.threshold(logits, top_k, top_p, min_p)

    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        return sampling.gumbel(seed, position, vocab_size)


def _gather(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of D numbers of the cache: [m] → [m, D]."""
    return cache.view(-1, cache.shape[-1]).index_select(0, index).to(dtype)


def _shared(x: Tensor) -> Tensor:
    """Keys or values [n, K, D] as [K, 1, n, D]: one for all query heads of a group."""
    return x.transpose(0, 1).unsqueeze(1)
