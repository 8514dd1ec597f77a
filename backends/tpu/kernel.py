"""Ragged paged attention as one Pallas kernel for TPUs: decodes, chunks of prompts and mixtures of both.

The grid runs over blocks of `Sizes.queries` tokens of the flat token axis. A block's work is a list of items, the
sequences that have tokens in it, and an item's work is a list of pieces, `Sizes.keys` keys each, from the first that
a query of the item may see to the last. A piece's cache blocks are copied from HBM into one of several buffers; a
cursor that walks over all pieces of all items, grid steps included, keeps the copies ahead of the arithmetic.

Softmax is computed piece by piece (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). The
rows of a block, `queries` × (H / K) per key/value head, have their running state in VMEM. A piece changes only the
rows of its item; the others meet masked scores. Where an item's rows lie in one tile of registers, as a decode's do,
only that tile is computed, so the size of a block costs a decode nothing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .work import LANES, Items, Sizes, plan, sizes

# A masked score lies so far below the least running maximum that its weight is 0 even in rows that have seen no key.
_MASKED, _LEAST = -1e30, -1e20
_NOBODY = -(1 << 30)  # a row that sees no key


class _Item(NamedTuple):
    """What the kernel derives of an item; int32 scalars.

    Attributes:
        low, high: its rows within the block.
        offset: position of the block's first query, were it this sequence's.
        table: where the numbers of its cache blocks begin in the flat block tables.
        end: keys from this position on are seen by no query of the item.
        first, last: the cache blocks with the keys that are seen: first to last - 1.
        pieces: at least 1, so that the cursor always meets the arithmetic.
    """

    low: Any
    high: Any
    offset: Any
    table: Any
    end: Any
    first: Any
    last: Any
    pieces: Any


def ragged_attention(
    q: Any,
    stack: Any,
    layer: Any,
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    *,
    scale: float,
    window: int | None,
    kv_heads: int,
    cut: Sizes | None = None,
    items: Items | None = None,
    interpret: Any = False,
) -> Any:
    """`Ops.attention` for a step whose keys and values are in the cache: [T, H, D] → [T, H, D]; padded tokens give 0.

    Only keys that a query may see have an effect: the null block, freed blocks and slots beyond a sequence may hold
    anything. Sequences do not touch each other either, NaN included.

    Args:
        q: [T, H, D], float32 or bfloat16; D is 64 or a multiple of 128, and H of kv_heads.
        stack: [layers, blocks, block size, W], the cache as `cache.py` has it; the block size is a power of two of at
            least 32 bytes / the size of a number. A dtype other than q's is converted to it in VMEM.
        layer: which layer; an integer, or a traced int32 scalar.
        query_start, seq_lens, block_tables: as in `StepInput`.
        scale: what scores are multiplied with; positive.
        window: tokens of the sliding window, or None.
        cut: how the work is cut; default: `sizes`.
        items: what `plan` gives for cut.queries; made here if absent.
        interpret: as `pallas_call` takes it.

    Raises:
        ValueError: D, a dtype, the block size or scale is none of those.
    """
    tokens, heads, head_dim = q.shape
    block_size, width = stack.shape[2:]
    _check(q, stack, scale)
    cut = cut or sizes(tokens, heads, kv_heads, head_dim, block_size, q.dtype, stack.dtype)
    items = items or plan(query_start, tokens, cut.queries)
    group, blocks = heads // kv_heads, pl.cdiv(tokens, cut.queries)
    rows = cut.queries * group
    # Of heads of 64, key and value share 128 lanes. Lanes are not taken apart: a query has zeros where the value is,
    # and of the weighted sum of pairs the second half is kept.
    lanes = max(head_dim, LANES)
    q = jnp.pad(q, ((0, blocks * cut.queries - tokens), (0, 0), (0, lanes - head_dim)))
    q = q.reshape(-1, kv_heads, group, lanes).transpose(1, 0, 2, 3).reshape(kv_heads, blocks * rows, lanes)
    block = pl.BlockSpec((kv_heads, rows, lanes), lambda b, *_: (0, b, 0))
    out = pl.pallas_call(
        partial(
            _kernel,
            cut=cut,
            group=group,
            head_dim=head_dim,
            table_blocks=block_tables.shape[1],
            exponent=scale * math.log2(math.e),
            window=window,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(blocks,),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((cut.buffers, cut.keys, width), stack.dtype),
                pltpu.SemaphoreType.DMA((cut.buffers,)),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.VMEM((kv_heads, rows, lanes), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # The cursor needs grid steps in their order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=_cost(tokens, heads, head_dim, q.dtype, stack, block_tables.shape, window, cut),
        interpret=interpret,
        name="ragged_attention",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        query_start,
        seq_lens,
        block_tables.reshape(-1),  # rows of scalar memory are padded to 128 numbers
        *items,
        q,
        stack,
    )
    out = out.reshape(kv_heads, -1, group, lanes).transpose(1, 0, 2, 3)
    return out.reshape(-1, heads, lanes)[:tokens, :, lanes - head_dim :]


def _check(q: Any, stack: Any, scale: float) -> None:
    head_dim, block_size, least = q.shape[2], stack.shape[2], 32 // stack.dtype.itemsize
    if head_dim != LANES // 2 and head_dim % LANES:
        raise ValueError(f"head_dim {head_dim} is neither 64 nor a multiple of 128: pad the heads")
    if jnp.float16 in (q.dtype, stack.dtype):
        raise ValueError("float16 is nothing a TPU kernel can load: use bfloat16 or float32")
    if block_size < least or block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size} is no power of two from {least}, a tile of {stack.dtype.name}")
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive, which the search for the largest score relies on")


def _cost(
    tokens: int, heads: int, head_dim: int, dtype: Any, stack: Any, tables: Any, window: int | None, cut: Sizes
) -> pl.CostEstimate:
    """For XLA, which does not know lengths: an upper bound, with every sequence as long as its table or the window."""
    sequences, table_blocks = tables
    block_size, width = stack.shape[2:]
    seen = table_blocks * block_size if window is None else min(table_blocks * block_size, window)
    # Keys are read once per item. A window reaches further back from the first query of a block than from the last.
    items = min(tokens, sequences + pl.cdiv(tokens, cut.queries) - 1)
    read = min(table_blocks * block_size, seen + min(cut.queries, tokens) - 1)
    return pl.CostEstimate(
        flops=4 * tokens * heads * head_dim * seen,
        transcendentals=tokens * heads * seen,
        bytes_accessed=items * read * width * stack.dtype.itemsize
        + 2 * tokens * heads * max(head_dim, LANES) * jnp.dtype(dtype).itemsize,
    )


def _kernel(
    layer: Any,
    query_start: Any,
    seq_lens: Any,
    tables: Any,
    starts: Any,
    item_block: Any,
    item_sequence: Any,
    q: Any,
    stack: Any,
    out: Any,
    buffers: Any,
    arrived: Any,
    cursor: Any,
    total: Any,
    peak: Any,
    summed: Any,
    *,
    cut: Sizes,
    group: int,
    head_dim: int,
    table_blocks: int,
    exponent: float,
    window: int | None,
) -> None:
    """One block of queries.

    Args:
        layer … item_sequence: scalars; `tables` is flat.
        q, out: the block, [K, rows, lanes].
        stack: the cache, in HBM.
        buffers: [cut.buffers, cut.keys, W], with a semaphore each in `arrived`.
        cursor: the next piece to copy: item, piece, buffer; and the buffer of the next piece to compute.
        total, peak, summed: float32 [K, rows, …]; per row the weighted values, the largest score before scaling and
            the sum of the weights; the latter two in every lane.
        exponent: scale × log2(e).
    """
    block_size = stack.shape[2]
    per_piece = cut.keys // block_size
    kv_heads, rows, _ = q.shape
    tile = 32 // q.dtype.itemsize
    this = pl.program_id(0)
    items = starts[pl.num_programs(0)]

    def describe(index: Any) -> _Item:
        s, at = item_sequence[index], item_block[index] * cut.queries
        low = jnp.maximum(query_start[s], at)
        high = jnp.minimum(query_start[s + 1], at + cut.queries)
        shift = seq_lens[s] - query_start[s + 1]  # from token to position
        first = 0 if window is None else lax.div(jnp.maximum(low + shift - window + 1, 0), block_size)
        last = lax.div(high + shift + block_size - 1, block_size)
        pieces = jnp.maximum(lax.div(last - first + per_piece - 1, per_piece), 1)
        rows = ((low - at) * group, (high - at) * group)
        return _Item(*rows, at + shift, s * table_blocks, high + shift, first, last, pieces)

    def count(item: _Item, piece: Any) -> Any:
        return jnp.clip(item.last - item.first - piece * per_piece, 0, per_piece)

    def copy(number: Any, buffer: Any, place: Any) -> Any:
        rows = pl.ds(pl.multiple_of(place * block_size, block_size), block_size)
        return pltpu.make_async_copy(stack.at[layer[0], number], buffers.at[buffer, rows], arrived.at[buffer])

    def following(buffer: Any) -> Any:
        return jnp.where(buffer == cut.buffers - 1, 0, buffer + 1)

    def fetch() -> None:
        """Starts the copies of the piece at the cursor, if there is one, and moves on."""
        index, piece, buffer = cursor[0], cursor[1], cursor[2]

        @pl.when(index < items)
        def _() -> None:
            item = describe(index)
            at = item.table + item.first + piece * per_piece

            def start(place: Any, _: None) -> None:
                copy(tables[at + place], buffer, place).start()

            lax.fori_loop(0, count(item, piece), start, None)
            done = piece + 1 >= item.pieces
            cursor[0] = jnp.where(done, index + 1, index)
            cursor[1] = jnp.where(done, 0, piece + 1)
            cursor[2] = following(buffer)

    def receive(item: _Item, piece: Any, buffer: Any) -> None:
        """Waits for a piece and puts zeros where it has no keys: a weight of 0 does not take a NaN away."""
        copied = count(item, piece)

        def wait(place: Any, _: None) -> None:
            copy(0, buffer, place).wait()

        lax.fori_loop(0, copied, wait, None)
        keys = item.end - (item.first + piece * per_piece) * block_size

        def clear(place: Any, _: None) -> None:
            rows = pl.ds(pl.multiple_of(place * block_size, block_size), block_size)
            row = lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) + place * block_size
            kept = buffers[buffer, rows, :].astype(jnp.float32)  # no chip selects among narrower numbers as surely
            buffers[buffer, rows, :] = jnp.where(row < keys, kept, 0.0).astype(buffers.dtype)

        lax.fori_loop(jnp.minimum(lax.div(keys, block_size), per_piece), per_piece, clear, None)

    def attend(item: _Item, piece: Any, buffer: Any, at: Any, size: int) -> None:
        """One piece for `size` rows from `at` on."""
        here = pl.ds(at, size)
        row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + at
        own = (row >= item.low) & (row < item.high)
        row = jnp.where(own, row, _NOBODY)
        # Query row // group sees a key at distance d from the block's first query if d <= row // group: if d × group
        # <= row, which takes no division.
        key = lax.broadcasted_iota(jnp.int32, (1, cut.keys), 1)
        key = (key + (item.first + piece * per_piece) * block_size - item.offset) * group
        visible = key <= row
        if window is not None:
            visible &= row < key + window * group
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        product = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        for k in range(kv_heads):
            pair = buffers[buffer, :, 2 * head_dim * k : 2 * head_dim * (k + 1)].astype(q.dtype)
            keys, values = (pair, pair) if head_dim < LANES else (pair[:, :head_dim], pair[:, head_dim:])
            scores = product(q[k, here, :], keys, (((1,), (1,)), ((), ())))
            scores = jnp.where(visible, scores, _MASKED)
            before = peak[k, here, :][:, :1]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2((scores - highest) * exponent)
            shrink = jnp.exp2((before - highest) * exponent)
            wide = (size, LANES)
            peak[k, here, :] = jnp.broadcast_to(highest, wide)
            added = jnp.sum(weights, axis=1, keepdims=True)
            summed[k, here, :] = summed[k, here, :] * shrink + jnp.broadcast_to(added, wide)
            added = product(weights.astype(q.dtype), values, (((1,), (0,)), ((), ())))
            total[k, here, :] = jnp.where(own, total[k, here, :] * shrink + added, total[k, here, :])

    def one_item(index: Any, _: None) -> None:
        item = describe(index)
        first_tile = lax.div(item.low, tile)

        def one_piece(piece: Any, _: None) -> None:
            fetch()
            buffer = cursor[3]
            receive(item, piece, buffer)
            if rows == tile:
                attend(item, piece, buffer, 0, rows)
            else:
                narrow = item.high <= (first_tile + 1) * tile

                @pl.when(narrow)
                def _() -> None:
                    attend(item, piece, buffer, pl.multiple_of(first_tile * tile, tile), tile)

                @pl.when(jnp.logical_not(narrow))
                def _() -> None:
                    attend(item, piece, buffer, 0, rows)

            cursor[3] = following(buffer)

        lax.fori_loop(0, item.pieces, one_piece, None)

    @pl.when(this == 0)
    def _() -> None:
        for field in range(4):
            cursor[field] = 0
        for _ in range(cut.buffers - 1):
            fetch()

    total[...] = jnp.zeros_like(total)
    summed[...] = jnp.zeros_like(summed)
    peak[...] = jnp.full_like(peak, _LEAST)
    lax.fori_loop(starts[this], starts[this + 1], one_item, None)
    for k in range(kv_heads):
        weight = summed[k][:, :1]
        out[k] = (total[k] / jnp.where(weight > 0, weight, 1.0)).astype(out.dtype)
