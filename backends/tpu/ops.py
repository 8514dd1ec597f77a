"""The forward pass's operations on JAX arrays. All are traced into one program per shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ...core.models.spec import ModelSpec
from ...core.ops import Body, Ops, StepContext
from ...core.sampling import filters
from ...core.step import Cache, StepInput, StepShape
from . import attend
from .cache import PagedLayer, padded_width
from .kernel import ragged_attention
from .mesh import AXIS, DeviceMesh
from .work import Items, Sizes, plan, sizes

# How arrays lie on the mesh, as seen by what runs per device.
_WHOLE = PartitionSpec()
_HEADS = PartitionSpec(None, AXIS, None)
_CACHE = PagedLayer(PartitionSpec(None, None, None, AXIS), _WHOLE)


class TpuOps(Ops):
    """jax.numpy. `Cache.layers` is one array for all layers, see `cache.py`; each device has its heads of it.

    Args:
        mesh: the devices.
        dtype_of: gives the dtype of a model's activations.
        kernel: whether attention is the Pallas kernel (`kernel.py`) or plain jax.numpy (`attend.py`).
    """

    def __init__(self, mesh: DeviceMesh, dtype_of: Callable[[ModelSpec], str], kernel: bool) -> None:
        super().__init__(jnp)
        self._mesh, self._dtype_of, self._kernel = mesh, dtype_of, kernel
        self._write = jax.jit(mesh.per_device(_write, (_CACHE, _HEADS, _HEADS, _WHOLE), _CACHE.stack))
        self._attend = cache(self._attend_with)

    def local_model(self, model: ModelSpec) -> ModelSpec:
        return self._mesh.padding(model).spec

    # ------------------------------------------------------------------ the paged cache

    def plan(self, model: ModelSpec, shape: StepShape, inputs: StepInput, cache: Cache) -> Any:
        """What the layers' attention shares: the kernel's items, or without it the tiles of chunks."""
        if self._kernel:
            block_size, dtype = cache.layers.shape[2], cache.layers.dtype
            cut = self._cut(model, shape.tokens, block_size, self._dtype_of(model), dtype)
            return plan(inputs.query_start, shape.tokens, cut.queries)
        return None if shape.decode else attend.cut(inputs, shape.tokens)

    def _cut(self, model: ModelSpec, tokens: int, block_size: int, dtype: Any, kv_dtype: Any) -> Sizes:
        heads, kv_heads = model.num_heads // self._mesh.size, model.num_kv_heads // self._mesh.size
        return sizes(tokens, heads, kv_heads, padded_width(model.head_dim), block_size, dtype, kv_dtype)

    def write_cache(self, cache: PagedLayer, k: Any, v: Any, ctx: StepContext) -> PagedLayer:
        stack = self._write(cache, _widen(k), _widen(v), ctx.inputs.slot_mapping)
        return PagedLayer(stack, cache.layer)

    def attention(self, q: Any, k: Any, v: Any, cache: PagedLayer, ctx: StepContext, window: int | None) -> Any:
        run = self._attend(ctx.model, ctx.shape.decode, window)
        return run(_widen(q), cache, ctx.inputs._replace(sampling=None), ctx.plan)[..., : ctx.model.head_dim]

    def _attend_with(self, model: ModelSpec, decode: bool, window: int | None) -> Any:
        """(q, cache, inputs, plan) → output, for all devices."""
        kv_heads = model.num_kv_heads // self._mesh.size

        def kernel(q: Any, cache: PagedLayer, inputs: StepInput, items: Items) -> Any:
            cut = self._cut(model, q.shape[0], cache.stack.shape[2], q.dtype, cache.stack.dtype)
            arrays = (cache.stack, cache.layer, inputs.query_start, inputs.seq_lens, inputs.block_tables)
            static = {"scale": model.scale, "window": window, "kv_heads": kv_heads, "cut": cut}
            return ragged_attention(q, *arrays, items=items, **static)

        plain = partial(attend.decode if decode else attend.mixed, scale=model.scale, window=window, kv_heads=kv_heads)
        run = kernel if self._kernel else plain
        return jax.jit(self._mesh.per_device(run, (_HEADS, _CACHE, _WHOLE, _WHOLE), _HEADS))

    def layer_cache(self, caches: Any, index: int) -> PagedLayer:
        return PagedLayer(caches, index)

    def with_layer_cache(self, caches: Any, index: int, cache: PagedLayer) -> Any:
        return cache.stack

    def layers(self, body: Body, x: Any, params: Any, caches: Any) -> tuple[Any, Any]:
        """A compiler's loop where the parameters are stacked (then all layers have the same window)."""
        if isinstance(params, list):
            return super().layers(body, x, params, caches)

        def one(carry: tuple[Any, Any], item: tuple[Any, Any]) -> tuple[tuple[Any, Any], None]:
            x, stack = carry
            index, layer = item
            x, cache = body(x, layer, PagedLayer(stack, index), 0)
            return (x, cache.stack), None

        count = caches.shape[0]
        (x, caches), _ = lax.scan(one, (x, caches), (jnp.arange(count, dtype=jnp.int32), params))
        return x, caches

    # ------------------------------------------------------------------ pieces

    def embed(self, table: Any, token_ids: Any) -> Any:
        return jnp.take(table, token_ids, axis=0, mode="clip")

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        out = _product(x, weight).astype(x.dtype)
        return out if bias is None else out + bias

    def logits(self, x: Any, weight: Any) -> Any:
        return _product(x, weight)

    def erf(self, x: Any) -> Any:
        return lax.erf(x)

    # ------------------------------------------------------------------ sampling

    def top_k(self, x: Any, k: int) -> tuple[Any, Any]:
        return lax.top_k(x, k)

    def scatter(self, x: Any, ids: Any, values: Any) -> Any:
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        # A negative index would count from the end; one beyond the end is dropped.
        return x.at[rows, jnp.where(ids < 0, x.shape[1], ids)].set(values, mode="drop")

    def threshold(self, logits: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        return filters.threshold(jnp, logits, top_k, top_p, min_p, repeat=_repeat)


def _product(x: Any, weight: Any) -> jax.Array:
    """[T, in] times the transposed [out, in], or [in / 128, out, 128] → float32 [T, out]."""
    # A TPU multiplies float32 in bfloat16 unless told otherwise.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contracted = ((1,), (1,))
    if weight.ndim == 3:
        x = x.reshape(x.shape[0], weight.shape[0], weight.shape[2])
        contracted = ((1, 2), (0, 2))
    return lax.dot_general(x, weight, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _repeat(times: int, body: Any, state: Any) -> Any:
    """A compiler's loop: the filters' bisection unrolled is most of what a sampler takes to compile."""
    return lax.fori_loop(0, times, lambda _, state: body(state), state)


def _widen(x: Any) -> Any:
    """[T, heads, D] → [T, heads, D as in the cache], zeros beyond D."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded_width(x.shape[2]) - x.shape[2])))


def _write(cache: PagedLayer, k: Any, v: Any, slots: Any) -> jax.Array:
    """The cache with keys and values [T, K, D] at slots int32 [T] of its layer."""
    layers, blocks, size, columns = cache.stack.shape
    pairs = jnp.stack([k, v], axis=2).reshape(k.shape[0], columns).astype(cache.stack.dtype)
    flat = cache.stack.reshape(layers * blocks * size, columns)
    return flat.at[cache.layer * blocks * size + slots].set(pairs).reshape(cache.stack.shape)
