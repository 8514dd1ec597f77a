"""Paged attention on ragged batches against float64, with garbage wherever no token may look."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.backend import StepLimits
from octavo.core.errors import ConfigError
from octavo.core.step import StepShape
from octavo.testing import reference
from octavo.testing.batches import Part, Pool, Stream, build_step, step_shape
from octavo.testing.models import tiny_spec
from octavo.testing.numbers import assert_close

NUM_BLOCKS = 96
# In units of the dtype's epsilon at the largest output. 16-bit devices may round scores and weights once each.
UNITS = {"float64": 32, "float32": 16, "float16": 2, "bfloat16": 2}

# (tokens in the cache, tokens of this step) of each sequence
BATCHES = {
    "one token": [(0, 1)],
    "prefill": [(0, 40)],
    "prefills": [(0, 17), (0, 1), (0, 33), (0, 16)],
    "chunk": [(35, 20)],
    "chunks": [(16, 16), (1, 30), (100, 7)],
    "decode one": [(70, 1)],
    "decode": [(5, 1), (130, 1), (15, 1), (16, 1), (64, 1), (0, 1), (31, 1)],
    "mixed": [(50, 1), (0, 20), (33, 18), (7, 1), (128, 1)],
}


@lru_cache(maxsize=4)
def load(kit, heads, kv_heads, head_dim, block_size):
    model = tiny_spec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=1)
    capabilities = kit.create().capabilities()
    if block_size not in capabilities.block_sizes:
        pytest.skip("the device does not take this block size")
    if capabilities.attention.head_dims is not None and head_dim not in capabilities.attention.head_dims:
        pytest.skip("the device does not take this head width")
    limits = StepLimits(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=512, block_size=block_size)
    try:
        return kit.load(model, limits, NUM_BLOCKS)
    except ConfigError as error:  # for example heads that do not divide over several devices
        pytest.skip(str(error))


def poison(loaded, rng):
    """NaN and infinities in every slot, those of the null block included."""
    slots = np.arange(NUM_BLOCKS * loaded.limits.block_size)
    shape = (len(slots), loaded.local.num_kv_heads, loaded.local.head_dim)
    loaded.write(slots, *rng.choice([np.nan, np.inf, -np.inf], (2, *shape)))


def check(loaded, batch, window, seed=0, padding=0):
    """Runs attention for a batch and compares it with the reference.

    Args:
        padding: how many tokens and sequences, and a block, the shape has beyond what the batch needs.
    """
    rng = np.random.default_rng(seed)
    m, size = loaded.local, loaded.limits.block_size
    if window is not None and not loaded.backend.capabilities().attention.sliding_window:
        pytest.skip("the device has no sliding window")
    pool = Pool(NUM_BLOCKS, seed)
    poison(loaded, rng)
    parts, histories = [], []
    for slot, (context, new) in enumerate(batch):
        stream = Stream(slot, context)
        stream.reserve(context + new, size, pool)
        parts.append(Part(stream, [0] * new))
        histories.append(loaded.rounded(rng.standard_normal((2, context + new, m.num_kv_heads, m.head_dim))))
    for part, (keys, values) in zip(parts, histories, strict=True):
        if part.sequence.length:
            slots = part.sequence.slots(0, part.sequence.length, size)
            loaded.write(slots, keys[: len(slots)], values[: len(slots)])
    constraints = loaded.backend.constraints(m, loaded.limits)
    shape = step_shape(parts, size, constraints)
    if padding and not constraints.shapes():  # shapes of a device with buckets are padded anyhow
        sequences = shape.sequences + padding
        tokens = sequences if shape.decode else shape.tokens + padding
        shape = StepShape(tokens, sequences, shape.blocks + 1, sequences, shape.decode, shape.sampler)
    step = build_step(parts, shape, size, loaded.limits.max_num_seqs)
    if window is not None:
        forget(step, parts, window, size)
    q = loaded.rounded(rng.standard_normal((shape.tokens, m.num_heads, m.head_dim)))
    k, v = rng.standard_normal((2, shape.tokens, m.num_kv_heads, m.head_dim))
    start = step.inputs.query_start
    for s, part in enumerate(parts):
        k[start[s] : start[s + 1]] = histories[s][0][part.sequence.length :]
        v[start[s] : start[s + 1]] = histories[s][1][part.sequence.length :]
    context = loaded.context(step)
    q_d, k_d, v_d = (loaded.array(x) for x in (q, k, v))
    cache = loaded.ops.write_cache(loaded.layer_cache(0), k_d, v_d, context)
    loaded.keep_layer_cache(0, cache)
    out = loaded.numpy(loaded.ops.attention(q_d, k_d, v_d, cache, context, window))
    assert np.isfinite(out).all()
    for s, (keys, values) in enumerate(histories):
        expected = reference.attention(q[start[s] : start[s + 1]], keys, values, window, m.scale)
        assert_close(out[start[s] : start[s + 1]], expected, loaded.dtype, UNITS[loaded.dtype], f"sequence {s}")


def forget(step, parts, window, size):
    """The block tables as the engine leaves them once a window has left a block: 0."""
    for s, part in enumerate(parts):
        left = max(part.sequence.length - window + 1, 0) // size
        step.inputs.block_tables[s, :left] = 0


@pytest.mark.parametrize("window", [None, 1, 24, 48])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(kit, name, window):
    check(load(kit, 6, 2, 32, 16), BATCHES[name], window)


@pytest.mark.parametrize("name", BATCHES)
def test_padded_shapes(kit, name):
    check(load(kit, 6, 2, 32, 16), BATCHES[name], None, seed=1, padding=3)
    check(load(kit, 6, 2, 32, 16), BATCHES[name], 20, seed=1, padding=3)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)])
def test_widths(kit, heads, kv_heads, head_dim, block_size):
    check(load(kit, heads, kv_heads, head_dim, block_size), [(40, 1), (0, 9), (20, 5)], None, seed=2)


def test_long_context(kit):
    """Longer than a tile of most implementations."""
    loaded = load(kit, 6, 2, 32, 16)
    check(loaded, [(900, 1), (3, 1)], None, seed=3)
    check(loaded, [(700, 40), (600, 1)], None, seed=3)
    check(loaded, [(700, 40), (600, 1)], 512, seed=3)


sequences = st.tuples(st.integers(0, 120), st.one_of(st.just(1), st.integers(1, 40)))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(sequences, min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 130)),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_random_batches(kit, batch, window, padding, seed):
    check(load(kit, 4, 2, 16, 16), batch, window, seed, padding)
