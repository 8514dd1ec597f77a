"""How the work of the attention kernel is cut: static sizes, the items of a step, and the scalar memory they take."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
_STATE_BYTES = 6 << 20  # of VMEM: queries, results and the state of the softmax
_BUFFER_BYTES = 4 << 20  # of VMEM: keys and values under way and at work
_PIECE_BYTES = 1 << 20
_LEAST_QUERIES = 16
_MOST_ROWS = 512  # per key/value head: scores are rows × keys
SCALAR_MEMORY = 960 << 10
"""Bytes of scalar memory that a step's `scalar_bytes` may take.

v5e, v5p, v6e and tpu7x have 1 MiB, to which libtpu 0.0.42 holds a kernel: with 64 sequences, tables of 4070 blocks
(1,041,920 bytes) compile and of 4071 do not; with 1024, of 250 (1,024,000) and not 251. What is missing to 1 MiB are
the other operands and 3 KiB. The rest of the difference is left to the program around the kernel.
"""
_SCALAR_UNIT = 512  # bytes; what an operand is rounded up to


class Sizes(NamedTuple):
    """How the work is cut. Static.

    Attributes:
        queries: tokens of a block, a multiple of 16, so that its rows fill tiles of any dtype.
        keys: keys of a piece, a multiple of the cache's block size.
        buffers: pieces that VMEM has room for; all but one are under way while one is computed.
    """

    queries: int
    keys: int
    buffers: int


class Items(NamedTuple):
    """The work of a step, for all layers: pairs of a block of queries and a sequence, in the order of the tokens.

    Attributes:
        start: int32 [blocks + 1]; block b has items start[b] to start[b + 1].
        block: int32 [blocks + S]; an item's block of queries.
        sequence: int32 [blocks + S]; an item's sequence.
    """

    start: Any
    block: Any
    sequence: Any


def sizes(tokens: int, heads: int, kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, kv_dtype: Any) -> Sizes:
    """What takes 8 to 12 MiB of VMEM, temporaries included (15 where a token has 32 KiB); all chips grant 16 unasked.

    Args:
        tokens: T.
        heads, kv_heads: those of one device.
        block_size: tokens of a cache block.
    """
    q_bytes, kv_bytes = jnp.dtype(q_dtype).itemsize, jnp.dtype(kv_dtype).itemsize
    # Queries and results are double-buffered; accumulator, maximum and sum are float32.
    per_token = heads * (4 * max(head_dim, LANES) * q_bytes + (max(head_dim, LANES) + 2 * LANES) * 4)
    most_rows = _MOST_ROWS // (q_bytes // 2)  # full precision is made of several products, with operands to keep
    queries = _LEAST_QUERIES
    while 2 * queries <= min(128, most_rows * kv_heads // heads, _STATE_BYTES // per_token) and queries < tokens:
        queries *= 2
    per_key = 2 * kv_heads * head_dim * kv_bytes
    keys = 32
    while 2 * keys <= min(512, _PIECE_BYTES // per_key):
        keys *= 2
    keys = max(keys, block_size)
    return Sizes(queries, keys, max(2, min(8, _BUFFER_BYTES // (keys * per_key))))


def scalar_bytes(sequences: int, blocks: int, tokens: int) -> int:
    """Bytes of scalar memory that the kernel takes for S sequences with tables of B blocks and T tokens, at most."""
    cuts = pl.cdiv(tokens, _LEAST_QUERIES)
    operands = (1, sequences + 1, sequences, sequences * blocks, cuts + 1, cuts + sequences, cuts + sequences, 4)
    return sum(pl.cdiv(4 * numbers, _SCALAR_UNIT) * _SCALAR_UNIT for numbers in operands)


def plan(query_start: Any, tokens: int, queries: int) -> Items:
    """The items of a step of T tokens in blocks of `queries`; query_start is int32 [S + 1]."""
    blocks, sequences = pl.cdiv(tokens, queries), query_start.shape[0] - 1
    start, end = query_start[:-1], query_start[1:]
    first = start // queries
    count = jnp.where(end > start, (end - 1) // queries + 1 - first, 0)
    total = jnp.cumsum(count)
    item = jnp.arange(blocks + sequences, dtype=jnp.int32)
    sequence = jnp.sum(total[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, sequences - 1)  # of items beyond the last, which nobody looks at
    block = first[sequence] + item - (total - count)[sequence]
    before = jnp.arange(blocks + 1, dtype=jnp.int32)[:, None] - first[None, :]
    starts = jnp.sum(jnp.clip(before, 0, count[None, :]), axis=1, dtype=jnp.int32)
    return Items(starts, block.astype(jnp.int32), sequence)
