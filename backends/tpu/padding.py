"""A model padded so that its heads, MLP columns and vocabulary divide over the devices of a mesh.

Padding is exact: added heads have zero weights on their way in and on their way out, added MLP columns give
activation(0) × 0 = 0, and the logits of added tokens are cut off. Where a model has fewer key/value heads than there
are devices, a head may be held several times, each copy with a part of the query heads that read it (as Megatron-LM's
tensor parallelism, arXiv 1909.08053, does for grouped-query attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...core.models.spec import ModelSpec, ParamSpec
from ...core.models.weights import HostTensor

NOTHING = -1
"""The source of a padded head, column or row: zeros."""


@dataclass(frozen=True)
class Padding:
    """How a model is padded.

    Attributes:
        spec: the padded model, which the programs compute.
        query: of each padded query head, the model's head that it is, or NOTHING.
        kv: the same for key/value heads.
    """

    spec: ModelSpec
    query: tuple[int, ...]
    kv: tuple[int, ...]

    def sources(self, param: ParamSpec) -> tuple[int, np.ndarray] | None:
        """What a padded parameter is made of.

        Returns:
            The width of a unit (a head has head_dim rows or columns, everything else is single), and for each unit of
            the split axis its place in the original or NOTHING: int32 [units]. None for parameters without padding.
        """
        name = param.path.rpartition(".")[2].removesuffix("_bias")
        if name in ("q", "o") and param.shard:
            return self.spec.head_dim, np.asarray(self.query, np.int32)
        if name in ("k", "v"):
            return self.spec.head_dim, np.asarray(self.kv, np.int32)
        if param.shard is None:
            return None
        size = self.spec.vocab_size if param.shard == "vocab" else self.spec.intermediate_size
        units = np.arange(size, dtype=np.int32)
        return 1, np.where(units < param.shape[split_axis(param)], units, NOTHING)

    def shape(self, param: ParamSpec) -> tuple[int, ...]:
        """The padded parameter's shape."""
        shape, sources = list(param.shape), self.sources(param)
        if sources is not None:
            unit, index = sources
            shape[split_axis(param)] = unit * len(index)
        return tuple(shape)

    def read(self, param: ParamSpec, value: HostTensor, part: tuple[slice, ...]) -> HostTensor:
        """A part of the padded parameter, whose bounds are whole units. Only that part of `value` is touched."""
        sources = self.sources(param)
        if sources is None:
            return HostTensor(value.data[part], value.dtype)
        axis = split_axis(param)
        unit, index = sources
        low, high, _ = part[axis].indices(unit * len(index))
        index = index[low // unit : high // unit]
        rest = list(part)
        if len(index) and index[0] != NOTHING and (np.diff(index) == 1).all():  # as it lies: a view is enough
            rest[axis] = slice(int(index[0]) * unit, (int(index[-1]) + 1) * unit)
            return HostTensor(value.data[tuple(rest)], value.dtype)
        out = np.zeros(
            [len(range(*s.indices(n))) for s, n in zip(part, self.shape(param), strict=True)], value.data.dtype
        )
        for at, source in enumerate(index):
            if source != NOTHING:
                rest[axis] = slice(int(source) * unit, (int(source) + 1) * unit)
                into = [slice(None)] * out.ndim
                into[axis] = slice(at * unit, (at + 1) * unit)
                out[tuple(into)] = value.data[tuple(rest)]
        return HostTensor(out, value.dtype)


def split_axis(param: ParamSpec) -> int:
    """The axis over which a parameter is split."""
    return len(param.shape) - 1 if param.shard == "row" else 0


@lru_cache(maxsize=8)
def pad(model: ModelSpec, devices: int) -> Padding:
    """The padding for so many devices: none where everything divides. Padding a padded model changes nothing."""
    copies, kv_heads, group = _head_counts(model.num_heads, model.num_kv_heads, devices)
    own = model.num_heads // model.num_kv_heads
    query, kv = [], []
    for head in range(kv_heads):
        source, copy = divmod(head, copies)
        real = source < model.num_kv_heads
        kv.append(source if real else NOTHING)
        for i in range(copy * group, (copy + 1) * group):
            query.append(source * own + i if real and i < own else NOTHING)
    spec = replace(
        model,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=_multiple(model.intermediate_size, devices),
        vocab_size=_multiple(model.vocab_size, devices),
    )
    return Padding(spec, tuple(query), tuple(kv))


def _head_counts(heads: int, kv_heads: int, devices: int) -> tuple[int, int, int]:
    """(copies of each key/value head, their padded number, query heads of each): the least cache, then least work."""
    own = heads // kv_heads
    options = ((copies, _multiple(kv_heads * copies, devices), -(-own // copies)) for copies in range(1, own + 1))
    return min(options, key=lambda option: (option[1], option[2]))


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
