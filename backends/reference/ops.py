"""The two ops that every backend has to bring, in plain NumPy, and the few defaults that NumPy needs otherwise.

One layer's cache is `LayerCache(keys, values)`, each [blocks, block size, K, D].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from ...core.ops import Ops, StepContext

_ERF = np.vectorize(math.erf, otypes=[np.float64])


class LayerCache(NamedTuple):
    """One layer's keys and values: [blocks, block size, K, D] each."""

    keys: np.ndarray
    values: np.ndarray


class ReferenceOps(Ops):
    """NumPy. Scores and softmax are computed in `wide`."""

    def __init__(self) -> None:
        super().__init__(xp)

    def write_cache(self, cache: LayerCache, k: Any, v: Any, ctx: StepContext) -> LayerCache:
        block_size = cache.keys.shape[1]
        block, offset = np.divmod(ctx.inputs.slot_mapping, block_size)
        cache.keys[block, offset] = k
        cache.values[block, offset] = v
        return cache

    def attention(self, q: Any, k: Any, v: Any, cache: LayerCache, ctx: StepContext, window: int | None) -> Any:
        inputs = ctx.inputs
        out = np.zeros_like(q)
        for s, length in enumerate(inputs.seq_lens):
            start, stop = inputs.query_start[s], inputs.query_start[s + 1]
            if start == stop:
                continue  # a padded sequence
            # Nothing before the first query's window is read: those blocks may have been freed.
            first = int(length) - int(stop - start)
            low = 0 if window is None else max(first - window + 1, 0)
            keys, values = self._read(cache, inputs.block_tables[s], low, int(length))
            out[start:stop] = self._attend(q[start:stop], keys, values, first - low, window, ctx.model.scale)
        return out

    def _read(self, cache: LayerCache, table: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values at positions low to high - 1 of a sequence: [high - low, K, D] each, in `wide`."""
        block, offset = np.divmod(np.arange(low, high), cache.keys.shape[1])
        slots = table[block], offset
        return cache.keys[slots].astype(self.wide), cache.values[slots].astype(self.wide)

    def _attend(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, window: int | None, scale: float
    ) -> np.ndarray:
        """Attention of one sequence's n queries to its m keys: [n, H, D], [m, K, D] twice → [n, H, D].

        Args:
            first: which key belongs to query 0.
        """
        n, heads, width = q.shape
        m, kv_heads, _ = keys.shape
        # [K, G, n, D]: the G query heads of a key/value head stand side by side.
        grouped = q.astype(self.wide).reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)
        scores = grouped @ keys.transpose(1, 2, 0)[:, None] * scale
        at, key = first + np.arange(n)[:, None], np.arange(m)[None, :]
        visible = key <= at
        if window is not None:
            visible &= key > at - window
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ values.transpose(1, 0, 2)[:, None]
        return mixed.transpose(2, 0, 1, 3).reshape(n, heads, width)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        if x.dtype != np.float16:
            return super().linear(x, weight, bias)
        # NumPy multiplies float16 matrices element by element, slowly and with float16 sums.
        out = np.matmul(x.astype(self.wide), weight.T.astype(self.wide))
        return (out if bias is None else out + bias).astype(np.float16)

    def erf(self, x: Any) -> Any:
        return _ERF(x).astype(x.dtype)

    def scatter(self, x: Any, ids: Any, values: Any) -> Any:
        row, entry = np.nonzero(ids >= 0)
        out = x.copy()
        out[row, ids[row, entry]] = values[row, entry]
        return out
