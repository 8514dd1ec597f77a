"""Padding a model until it divides over a mesh: which head goes where, and what each device reads of a weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.tpu.padding import NOTHING, pad, split_axis
from octavo.core.models.spec import layer_params, model_params
from octavo.core.models.weights import HostTensor
from octavo.testing.models import RandomWeights, tiny_spec


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 9), devices=st.integers(1, 16))
def test_every_head_is_there_once_beside_the_keys_it_reads(kv_heads: int, group: int, devices: int) -> None:
    model = tiny_spec(num_heads=kv_heads * group, num_kv_heads=kv_heads)
    padding = pad(model, devices)
    spec = padding.spec
    assert spec.num_kv_heads % devices == spec.intermediate_size % devices == spec.vocab_size % devices == 0
    assert (len(padding.query), len(padding.kv)) == (spec.num_heads, spec.num_kv_heads)
    assert sorted(h for h in padding.query if h != NOTHING) == list(range(model.num_heads))
    for place, head in enumerate(padding.query):
        if head != NOTHING:
            assert padding.kv[place // (spec.num_heads // spec.num_kv_heads)] == head // group
    assert pad(spec, devices).spec == spec


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "expected"),
    [
        (32, 8, 1, (32, 8)),
        (32, 8, 8, (32, 8)),
        (32, 8, 16, (32, 16)),  # each key head twice
        (9, 3, 2, (12, 4)),  # a fourth group of zeros
        (9, 3, 4, (12, 4)),
        (8, 1, 8, (8, 8)),
        (14, 2, 4, (16, 4)),  # seven query heads to a key head: four and three
    ],
)
def test_no_more_heads_than_needed(heads: int, kv_heads: int, devices: int, expected: tuple[int, int]) -> None:
    spec = pad(tiny_spec(num_heads=heads, num_kv_heads=kv_heads), devices).spec
    assert (spec.num_heads, spec.num_kv_heads) == expected


@pytest.mark.parametrize("devices", [1, 2, 4, 5])
def test_the_parts_of_a_parameter_are_its_rows_and_zeros(devices: int) -> None:
    """Against the definition: unit by unit, in the whole padded parameter."""
    model = tiny_spec(num_heads=9, num_kv_heads=3, intermediate_size=81, qkv_bias=True, o_bias=True, mlp_bias=True)
    padding = pad(model, devices)
    padded = {p.path: p.shape for p in model_params(padding.spec)}
    for param in model_params(model):
        value = RandomWeights().read(param)
        assert padding.shape(param) == padded[param.path]
        whole = (slice(None),) * len(param.shape)
        if param.shard is None:
            np.testing.assert_array_equal(padding.read(param, value, whole).data, value.data)
            continue
        axis = split_axis(param)
        step = padded[param.path][axis] // devices
        parts = []
        for device in range(devices):
            part = list(whole)
            part[axis] = slice(device * step, (device + 1) * step)
            parts.append(padding.read(param, value, tuple(part)).data)
        got = np.moveaxis(np.concatenate(parts, axis=axis), axis, 0)
        source = np.moveaxis(value.data, axis, 0)
        name = param.path.rpartition(".")[2]
        unit, heads = 1, range(len(got))
        if name[0] in "qkvo" and name not in ("o_bias",):
            unit, heads = model.head_dim, padding.kv if name[0] in "kv" else padding.query
        for place, head in enumerate(heads):
            expected = source[head * unit : (head + 1) * unit] if head != NOTHING else 0
            if unit == 1 and place >= len(source):
                expected = 0
            np.testing.assert_array_equal(got[place * unit : (place + 1) * unit], expected)


def test_a_part_that_lies_as_it_is_needed_is_no_copy() -> None:
    """So of a mapped file only that part is read."""
    model = tiny_spec(num_heads=8, num_kv_heads=4)
    param = next(p for p in layer_params(model, 0) if p.path.endswith(".q"))
    data = np.zeros(param.shape, np.float32)
    rows = model.head_dim * 4
    part = pad(model, 2).read(param, HostTensor(data, "float32"), (slice(rows, 2 * rows), slice(None))).data
    assert np.shares_memory(part, data)
    assert part.shape == (rows, model.hidden_size)
