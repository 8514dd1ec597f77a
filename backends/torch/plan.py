"""What all layers of a step share: which cache rows each query reads, in tiles of bounded size.

Only tokens that a query may see are ever read: positions beyond a sequence's end point to its last token, and a
mask takes them out. So what lies in unused slots cannot matter, not even NaN.

A layer's cache is one tensor [2 K, blocks, block size, D] (K heads of keys, then K of values), read as a table of
rows of D numbers. Gathering rows is as fast as gathering blocks, and it needs no alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...core.step import StepInput

Tensor = torch.Tensor

TILE_BYTES = 4 << 20
"""Keys and values that are gathered at once: small enough to be still in the processor's cache when they are used."""

QUERY_TILE = 512
"""Queries of a prefill chunk that are masked at once."""


@dataclass(frozen=True)
class Tile:
    """Some positions of n sequences.

    Attributes:
        index: [2 K × n × m]; rows of the cache.
        sequences, length: n and m.
        mask: [1, n, 1, m], added to the scores; None where every position is real.
    """

    index: Tensor
    sequences: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class Group:
    """Decoding sequences of similar length.

    Attributes:
        rows: int64 [n]; their tokens in the step; None: all tokens of the step in their order.
        tiles: their contexts; several only for a single sequence that is too long for one tile.
    """

    rows: Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Chunk:
    """A sequence with several tokens in the step: tokens start to stop, the first of them at position `first`."""

    sequence: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Span:
    """Queries `start` to `stop` of a chunk, and the keys that some of them see.

    Attributes:
        index: [2 K × m]; rows of the cache.
        mask: [n, m], added to the scores.
    """

    start: int
    stop: int
    index: Tensor
    mask: Tensor


class Plan:
    """The step's attention. Tiles are made when the first layer with a given window asks, and kept for the others.

    Attributes:
        slots: int64 [T]; where the step's keys and values go.
        tokens: how many of the T tokens are real.
        chunks: sequences with several tokens.
    """

    def __init__(self, inputs: StepInput, tile_bytes: int = TILE_BYTES) -> None:
        self.slots = inputs.slot_mapping.long()
        start = inputs.query_start.cpu().numpy()
        self._lens = inputs.seq_lens.cpu().numpy()
        self._tables = inputs.block_tables.cpu().numpy()
        self._device = inputs.slot_mapping.device
        self._tile_bytes = tile_bytes
        counts = np.diff(start)
        self.tokens = int(start[-1])
        self._decoding = np.flatnonzero(counts == 1)
        self._rows = start[self._decoding]
        self._in_order = len(self._decoding) == inputs.token_ids.shape[0]
        self.chunks = [
            Chunk(s, int(start[s]), int(start[s + 1]), int(self._lens[s] - counts[s]))
            for s in np.flatnonzero(counts > 1).tolist()
        ]
        self._groups: dict[int | None, list[Group]] = {}
        self._context: dict[int, list[Tensor]] = {}
        self._spans: dict[tuple[int, int | None], list[Span]] = {}
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    def groups(self, window: int | None, cache: Tensor, dtype: torch.dtype) -> list[Group]:
        """The decoding sequences, longest first. Masks have the given dtype."""
        if window not in self._groups:
            self._groups[window] = list(self._make_groups(window, cache, dtype))
        return self._groups[window]

    def context(self, chunk: Chunk, cache: Tensor) -> list[Tensor]:
        """Cache rows [2 K × m] of all positions before a chunk, tile by tile."""
        if chunk.sequence not in self._context:
            step = self._tile_tokens(cache)
            ranges = [(low, min(low + step, chunk.first)) for low in range(0, chunk.first, step)]
            self._context[chunk.sequence] = [self._range(chunk.sequence, low, high, cache) for low, high in ranges]
        return self._context[chunk.sequence]

    def spans(self, chunk: Chunk, window: int | None, cache: Tensor, dtype: torch.dtype) -> list[Span]:
        """A chunk's queries in tiles, each with its keys, the chunk's own among them. Masks have the given dtype."""
        key = chunk.sequence, window
        if key not in self._spans:
            self._spans[key] = list(self._make_spans(chunk, window, cache, dtype))
        return self._spans[key]

    def _make_groups(self, window: int | None, cache: Tensor, dtype: torch.dtype) -> Iterator[Group]:
        limit = self._tile_tokens(cache)
        sequences, rows = self._decoding, self._rows
        lens = self._lens[sequences]
        seen = lens if window is None else np.minimum(lens, window)
        if not len(sequences):
            return
        if self._in_order and len(sequences) * int(seen.max()) <= limit:
            yield Group(None, (self._tile(sequences, lens - seen, int(seen.max()), cache, dtype),))
            return
        order = np.argsort(-seen, kind="stable")
        sequences, rows, lens, seen = sequences[order], rows[order], lens[order], seen[order]
        at = 0
        while at < len(order):
            longest = int(seen[at])
            # Not more than fits, and none of less than half the length: padding is read and computed as well.
            alike = int(np.searchsorted(-seen, -(longest // 2), side="right"))
            stop = min(at + max(limit // longest, 1), max(alike, at + 1))
            first = lens[at:stop] - seen[at:stop]
            parts = range(0, longest, max(limit, longest if stop - at > 1 else 0))
            tiles = tuple(
                self._tile(sequences[at:stop], first + low, min(low + limit, longest) - low, cache, dtype)
                for low in parts
            )
            yield Group(self._to_device(rows[at:stop].astype(np.int64)), tiles)
            at = stop

    def _tile(self, sequences: np.ndarray, first: np.ndarray, length: int, cache: Tensor, dtype: torch.dtype) -> Tile:
        """Positions first[i] to first[i] + length - 1 of sequence i, as far as it has them."""
        last = self._lens[sequences][:, None] - 1
        wanted = first[:, None] + np.arange(length, dtype=np.int32)
        beyond = wanted > last
        mask = None
        if beyond.any():
            np.minimum(wanted, last, out=wanted)
            values = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(torch.from_numpy(beyond), -torch.inf)
            mask = values[None, :, None, :].to(self._device)
        return Tile(self._index(sequences[:, None], wanted, cache), len(sequences), length, mask)

    def _make_spans(self, chunk: Chunk, window: int | None, cache: Tensor, dtype: torch.dtype) -> Iterator[Span]:
        tokens = chunk.stop - chunk.start
        for start in range(0, tokens, QUERY_TILE):
            stop = min(start + QUERY_TILE, tokens)
            high = chunk.first + stop
            low = 0 if window is None else max(chunk.first + start - window + 1, 0)
            # Far from the sequence's beginning all masks are alike, so they are kept by what they depend on.
            key = (stop - start, high - low, chunk.first + start - low, window)
            if key not in self._masks:
                self._masks[key] = _mask(*key, dtype).to(self._device)
            yield Span(start, stop, self._range(chunk.sequence, low, high, cache), self._masks[key])

    def _range(self, sequence: int, low: int, high: int, cache: Tensor) -> Tensor:
        return self._index(np.asarray(sequence), np.arange(low, high, dtype=np.int32), cache)

    def _index(self, sequences: np.ndarray, positions: np.ndarray, cache: Tensor) -> Tensor:
        """Cache rows of all 2 K heads at the positions, flattened: [2 K × positions.size]."""
        heads, blocks, size, _ = cache.shape
        block, offset = np.divmod(positions, np.int32(size))
        slots = self._tables[sequences, block] * np.int32(size) + offset
        dtype = np.int32 if heads * blocks * size < 2**31 else np.int64
        first = np.arange(heads, dtype=dtype) * dtype(blocks * size)
        return self._to_device((first[:, None] + slots.reshape(1, -1)).reshape(-1))

    def _tile_tokens(self, cache: Tensor) -> int:
        heads, _, _, width = cache.shape
        return max(self._tile_bytes // (heads * width * cache.element_size()), 16)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _mask(queries: int, keys: int, first: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[queries, keys]: 0 where query i, standing at key first + i, sees the key, -inf elsewhere."""
    at, key = first + torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    hidden = key > at
    if window is not None:
        hidden |= key <= at - window
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, -torch.inf)
