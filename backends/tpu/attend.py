"""Attention over the paged cache in plain jax.numpy: correct on every platform, the oracle for kernels.

Softmax is computed piece by piece over the keys (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv
2205.14135), so what is gathered is bounded whatever the context. The loops run over data-dependent ranges: a step of
short sequences is short in a program made for long ones, so block tables need few sizes.

Two shapes of work. Sequences with one token run side by side, a query each. Chunks of prompts run tile by tile: TILE
queries of one sequence against its keys. A mixed step does both; where there is nothing of a kind, its loop has no
turn, so that mixed steps need no programs of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core.step import StepInput
from .cache import PagedLayer

TILE = 128
"""Queries of a prompt that are computed together."""
PIECE_TOKENS = 512
"""Keys of a sequence that are computed together, at most."""
PIECE_BYTES = 64 << 20
"""Gathered keys and values, at most."""
_LOWEST = -1e30  # finite, so that a row without any key gives 0 and not NaN


class Tiles(NamedTuple):
    """The chunks of a step, cut into tiles of TILE queries; computed once for all layers.

    Attributes:
        sequence: int32 [n]; whose queries a tile has.
        offset: int32 [n]; its first query within the sequence's tokens of this step.
        count: int32 []; tiles that are real; they come first and in the order of the tokens.
    """

    sequence: Any
    offset: Any
    count: Any


def cut(inputs: StepInput, tokens: int) -> Tiles:
    """Tiles of all sequences that have more than one token in this step."""
    counts = jnp.diff(inputs.query_start)
    size = min(TILE, tokens)
    ends = jnp.cumsum(jnp.where(counts > 1, -(-counts // size), 0))
    tile = jnp.arange(tokens // size + counts.shape[0], dtype=jnp.int32)
    sequence = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, counts.shape[0] - 1)
    before = jnp.where(sequence > 0, ends[sequence - 1], 0)
    return Tiles(sequence, ((tile - before) * size).astype(jnp.int32), ends[-1])


def decode(
    q: Any, cache: PagedLayer, inputs: StepInput, plan: None, *, scale: float, window: int | None, kv_heads: int
) -> Any:
    """A step in which every sequence has one token: [S, H, D] → [S, H, D]; 0 for padded sequences."""
    return _last(q, cache, inputs.block_tables, inputs.seq_lens, scale, window, kv_heads)


def mixed(
    q: Any, cache: PagedLayer, inputs: StepInput, tiles: Tiles, *, scale: float, window: int | None, kv_heads: int
) -> Any:
    """Any step: [T, H, D] → [T, H, D]; padded tokens have some finite value."""
    tokens, size = q.shape[0], min(TILE, q.shape[0])
    start, counts = inputs.query_start[:-1], jnp.diff(inputs.query_start)
    first = inputs.seq_lens - counts
    # A tile may reach beyond its sequence: what it writes there is overwritten by the tiles that follow.
    queries = jnp.pad(q, ((0, size), (0, 0), (0, 0)))
    inner = jnp.arange(size, dtype=jnp.int32)

    def tile(index: Any, out: Any) -> Any:
        s, offset = tiles.sequence[index], tiles.offset[index]
        at = start[s] + offset
        low = first[s] + offset
        real = inner < counts[s] - offset
        positions = jnp.where(real, low + inner, -1)[None]
        high = jnp.minimum(low + size, inputs.seq_lens[s])[None]
        table = lax.dynamic_slice_in_dim(inputs.block_tables, s, 1)
        part = lax.dynamic_slice_in_dim(queries, at, size)[None]
        done = _attend(part, positions, cache, table, high, scale, window, kv_heads)[0]
        return lax.dynamic_update_slice_in_dim(out, done, at, axis=0)

    out = lax.fori_loop(0, tiles.count, tile, jnp.zeros_like(queries))[:tokens]
    single = counts == 1
    last = jnp.take(q, start, axis=0, mode="clip")
    alone = _last(last, cache, inputs.block_tables, jnp.where(single, inputs.seq_lens, 0), scale, window, kv_heads)
    return out.at[jnp.where(single, start, tokens)].set(alone, mode="drop")


def _last(q: Any, cache: PagedLayer, tables: Any, lengths: Any, scale: float, window: int | None, kv_heads: int) -> Any:
    """The last token of each sequence: [S, H, D], int32 [S, B], int32 [S] → [S, H, D]; 0 where the length is 0."""
    return _attend(q[:, None], lengths[:, None] - 1, cache, tables, lengths, scale, window, kv_heads)[:, 0]


def _attend(
    q: Any, positions: Any, cache: PagedLayer, tables: Any, high: Any, scale: float, window: int | None, kv_heads: int
) -> Any:
    """Q queries of each of n sequences.

    Args:
        q: [n, Q, H, D].
        positions: int32 [n, Q]; ascending in a row, then -1 for queries that are none.
        tables: int32 [n, B].
        high: int32 [n]; keys from this position on are not looked at; 0 for none at all.

    Returns:
        [n, Q, H, D]; 0 for queries that are none.
    """
    n, queries, heads, depth = q.shape
    size, kv = cache.stack.shape[2], kv_heads
    per_block = n * size * cache.stack.shape[3] * q.dtype.itemsize
    blocks = max(1, min(tables.shape[1], PIECE_TOKENS // size, PIECE_BYTES // per_block))
    span = blocks * size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))
    q = q.reshape(n, queries, kv, heads // kv, depth)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    # Keys before the first query's window may be in blocks that were freed and overwritten.
    low = jnp.zeros_like(high) if window is None else jnp.maximum(positions[:, 0] - window + 1, 0)

    def piece(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        peak, total, out = state
        table = lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)
        at = index * span + jnp.arange(span, dtype=jnp.int32)[None]
        used = (at >= low[:, None]) & (at < high[:, None])  # [n, M]
        pairs = _gather(cache, table).astype(q.dtype).reshape(n, span, kv, 2, depth)
        # What lies in unused slots may be NaN: scores are replaced, but values would be multiplied with 0.
        values = jnp.where(used[:, :, None, None], pairs[:, :, :, 1], 0)
        visible = used[:, None] & (at[:, None] <= positions[:, :, None])  # [n, Q, M]
        if window is not None:
            visible &= at[:, None] > positions[:, :, None] - window
        visible = visible[:, None, None]
        scores = product("nqkgd,nmkd->nkgqm", q, pairs[:, :, :, 0]) * scale
        scores = jnp.where(visible, scores, _LOWEST)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0.0)
        shrink = jnp.exp(peak - higher)
        total = total * shrink + weights.sum(axis=-1)
        out = out * shrink[..., None] + product("nkgqm,nmkd->nkgqd", weights.astype(q.dtype), values)
        return higher, total, out

    shape = (n, kv, heads // kv, queries)
    empty = (jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, depth)))
    begin, end = jnp.min(jnp.where(high > 0, low, high.max())) // span, (jnp.max(high) + span - 1) // span
    _, total, out = lax.fori_loop(begin, end, piece, empty)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(n, queries, heads, depth).astype(q.dtype)


def _gather(cache: PagedLayer, table: Any) -> Any:
    """Blocks of a layer: int32 [n, P] → [n, P, block size, W]."""
    layers, blocks, size, columns = cache.stack.shape
    flat = cache.stack.reshape(layers * blocks, size, columns)
    return jnp.take(flat, cache.layer * blocks + table, axis=0, mode="clip")
