"""The paged KV cache on JAX: one array for all layers, and moving its blocks about.

The array is [layers, blocks, block size, W] with W = K × 2 × D: key and value of a head side by side, so a mesh
splits W by heads. A TPU keeps the last two axes in tiles of 8 × 128 (16 × 128 for 16-bit numbers). Blocks of 16 tokens
fill them, and W does because D is padded to 64 or to a multiple of 128: nothing is lost to tiles.

All layers are in one array because a compiler's loop over layers can then carry it and update it in place; separate
arrays would have to be stacked and unstacked around the loop, which copies the cache in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core.backend import CacheSpec

MOVED = 32
"""Blocks moved per call of a compiled mover; more take several calls, fewer are padded."""


class PagedLayer(NamedTuple):
    """A layer's part of the cache, as the ops take it.

    Attributes:
        stack: the whole array, [layers, blocks, block size, W].
        layer: the layer's index, a Python integer or, inside a loop over layers, a traced one.
    """

    stack: Any
    layer: Any


def padded_width(head_dim: int) -> int:
    """D in the cache: a head's key and value together fill whole rows of tiles."""
    return 64 if head_dim <= 64 else -(-head_dim // 128) * 128


def width(spec: CacheSpec) -> int:
    """W: numbers per token and layer."""
    return 2 * spec.num_kv_heads * spec.head_dim


def _rows(stack: Any, blocks: Any) -> tuple[Any, Any]:
    """The cache as rows of [block size, W], and in it those of blocks int32 [n] in each layer: int32 [n, layers].

    Along one leading axis, rows are moved where they lie; along the second of two, the TPU's compiler would rather
    copy the whole cache into another order and back.
    """
    layers, count, size, columns = stack.shape
    rows = jnp.arange(layers, dtype=jnp.int32) * count + blocks[:, None]
    return stack.reshape(layers * count, size, columns), jnp.where(blocks[:, None] < count, rows, layers * count)


def read_blocks(stack: Any, blocks: Any) -> Any:
    """Contents of blocks, int32 [n] → [n, layers, block size, W]; a number beyond the last gives anything."""
    flat, rows = _rows(stack, blocks)
    return jnp.take(flat, rows, axis=0, mode="clip")


def write_blocks(stack: Any, blocks: Any, contents: Any) -> Any:
    """The cache with contents [n, layers, block size, W] in blocks int32 [n]; a number beyond the last is skipped."""
    flat, rows = _rows(stack, blocks)
    return flat.at[rows].set(contents, mode="drop").reshape(stack.shape)


def copy_blocks(stack: Any, source: Any, target: Any) -> Any:
    """The cache with blocks source [n] copied to target [n]; a target beyond the last is skipped."""
    return write_blocks(stack, target, read_blocks(stack, source))


def lower_movers(stack: Any, replicated: Any) -> dict[str, jax.stages.Lowered]:
    """The movers of MOVED blocks, "read", "write" and "copy", for a cache array, or for what one would be like.

    Args:
        stack: the array, or its shape, dtype and sharding.
        replicated: the sharding of block numbers and contents.
    """
    layers, _, size, columns = stack.shape
    index = jax.ShapeDtypeStruct((MOVED,), jnp.int32, sharding=replicated)
    contents = jax.ShapeDtypeStruct((MOVED, layers, size, columns), stack.dtype, sharding=replicated)
    # The result has the sharding of the argument: left to choose, the compiler may take one that no program accepts.
    in_place = {"donate_argnums": 0, "out_shardings": stack.sharding}
    return {
        "read": jax.jit(read_blocks, out_shardings=replicated).lower(stack, index),
        "write": jax.jit(write_blocks, **in_place).lower(stack, index, contents),
        "copy": jax.jit(copy_blocks, **in_place).lower(stack, index, index),
    }


class BlockMover:
    """Moves blocks of one cache array with programs compiled for it: as many calls as MOVED blocks each take."""

    def __init__(self, stack: jax.Array, put: Callable[[np.ndarray], jax.Array], replicated: Any) -> None:
        layers, self._num_blocks, size, columns = stack.shape
        self._put = put
        self._dtype = np.dtype(stack.dtype)
        self._block = (layers, size, columns)
        programs = {name: lowered.compile() for name, lowered in lower_movers(stack, replicated).items()}
        self._read, self._write, self._copy = programs["read"], programs["write"], programs["copy"]

    def _index(self, blocks: np.ndarray) -> jax.Array:
        padded = np.full(MOVED, self._num_blocks, np.int32)
        padded[: len(blocks)] = blocks
        return self._put(padded)

    def export(self, stack: jax.Array, blocks: np.ndarray) -> np.ndarray:
        """int32 [n] → uint8 [n, bytes]."""
        parts = [
            np.asarray(self._read(stack, self._index(part)))[: len(part)].reshape(len(part), -1).view(np.uint8)
            for part in _parts(blocks)
        ]
        return np.concatenate(parts)

    def load(self, stack: jax.Array, blocks: np.ndarray, contents: np.ndarray) -> jax.Array:
        """The cache with what `export` gave in blocks int32 [n]."""
        rows = np.ascontiguousarray(contents).view(self._dtype).reshape(-1, *self._block)
        for part, values in zip(_parts(blocks), _parts(rows), strict=True):
            padded = np.zeros((MOVED, *self._block), self._dtype)
            padded[: len(part)] = values
            stack = self._write(stack, self._index(part), self._put(padded))
        return stack

    def copy(self, stack: jax.Array, source: np.ndarray, target: np.ndarray) -> jax.Array:
        """The cache with blocks source copied to target. No target is a source, so parts may follow one another."""
        for read, write in zip(_parts(source), _parts(target), strict=True):
            stack = self._copy(stack, self._index(read), self._index(write))
        return stack


def _parts(array: np.ndarray) -> list[np.ndarray]:
    return [array[at : at + MOVED] for at in range(0, len(array), MOVED)]
