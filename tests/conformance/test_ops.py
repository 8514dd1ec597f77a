"""Each op of the forward pass against float64."""

import numpy as np
import pytest

from octavo.core.backend import StepLimits
from octavo.testing import reference
from octavo.testing.models import tiny_spec
from octavo.testing.numbers import assert_close

LIMITS = StepLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=16)


@pytest.fixture(scope="module")
def loaded(kit):
    return kit.load(tiny_spec(), LIMITS, num_blocks=8)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(loaded, rng, tokens, bias):
    x, w, b = rng.standard_normal((tokens, 72)), rng.standard_normal((40, 72)) / 8, rng.standard_normal(40)
    out = loaded.ops.linear(loaded.array(x), loaded.weight(w), loaded.weight(b, "bias") if bias else None)
    expected = reference.linear(loaded.rounded(x), loaded.rounded(w), loaded.rounded(b) if bias else None)
    assert_close(loaded.numpy(out), expected, loaded.dtype, 4)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_rms_norm(loaded, rng, scale):
    x, w = rng.standard_normal((9, 48)) * scale, 1 + 0.2 * rng.standard_normal(48)
    out = loaded.ops.rms_norm(loaded.array(x), loaded.weight(w, "norm"), 1e-5)
    assert_close(loaded.numpy(out), reference.rms_norm(loaded.rounded(x), loaded.rounded(w), 1e-5), loaded.dtype, 4)


def test_rms_norm_of_large_numbers_does_not_overflow(loaded):
    """The square of 1000 is beyond float16: norms are computed wider."""
    x = np.full((2, 48), 1000.0)
    out = loaded.ops.rms_norm(loaded.array(x), loaded.weight(np.ones(48), "norm"), 1e-5)
    assert_close(loaded.numpy(out), reference.rms_norm(x, np.ones(48), 1e-5), loaded.dtype, 4)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_rotary(loaded, rng, factor):
    inv_freq = (10000.0 ** (-np.arange(16) / 16)).astype(np.float32)
    positions = np.asarray([0, 1, 2, 100, 4095, 131071], np.int32)
    x = rng.standard_normal((6, 5, 32))
    device = loaded.backend.from_host
    cos, sin = loaded.ops.rotary_table(device(inv_freq), device(positions), factor)
    expected_cos, expected_sin = reference.rotary_table(inv_freq.astype(np.float64), positions, factor)
    # Far from the beginning the angle itself is rounded: at position 131071 by up to 2^-8 radians in float32.
    assert_close(loaded.numpy(cos)[:4], expected_cos[:4], loaded.wide, 64, "cos")
    assert_close(loaded.numpy(sin)[:4], expected_sin[:4], loaded.wide, 64, "sin")
    assert_close(loaded.numpy(cos), expected_cos, loaded.wide, 32768, "cos of far positions")
    out = loaded.ops.rotary(loaded.array(x), cos, sin)
    expected = reference.rotary(loaded.rounded(x), loaded.numpy(cos), loaded.numpy(sin))
    assert_close(loaded.numpy(out), expected, loaded.dtype, 3, "rotary")


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activation(loaded, rng, kind):
    x = np.concatenate([rng.standard_normal(500), [0.0, -30.0, 30.0, -100.0, 100.0]])[None, :]
    out = loaded.numpy(loaded.ops.activation(loaded.array(x), kind))
    expected = reference.activation(loaded.rounded(x), kind)
    assert_close(out[:, :-4], expected[:, :-4], loaded.dtype, 4)
    assert_close(out, expected, loaded.dtype, 4)


def test_embed(loaded, rng):
    table, ids = rng.standard_normal((31, 48)), np.asarray([0, 30, 7, 7, 1], np.int32)
    out = loaded.ops.embed(loaded.weight(table, "embedding"), loaded.backend.from_host(ids))
    assert (loaded.numpy(out) == loaded.rounded(table)[ids]).all()


def test_logits(loaded, rng):
    x, w = rng.standard_normal((3, 48)), rng.standard_normal((199, 48)) / 8
    out = loaded.ops.logits(loaded.array(x), loaded.weight(w))
    assert loaded.backend.to_host(out).dtype == np.dtype(loaded.wide)
    assert_close(loaded.numpy(out), reference.linear(loaded.rounded(x), loaded.rounded(w)), loaded.dtype, 4)


@pytest.mark.parametrize("k", [1, 5, 32])
def test_top_k(loaded, rng, k):
    x = rng.permuted(np.tile(np.arange(199.0), (4, 1)), axis=1) - 50
    values, ids = loaded.ops.top_k(loaded.array(x, loaded.wide), k)
    assert loaded.backend.to_host(ids).dtype == np.int32
    assert (loaded.numpy(ids) == np.argsort(-x, axis=1)[:, :k]).all()
    assert (loaded.numpy(values) == -np.sort(-x, axis=1)[:, :k]).all()


def test_scatter(loaded, rng):
    x = rng.standard_normal((3, 20)).astype(np.float32)
    ids = np.asarray([[0, 19, -1, 5], [-1, -1, -1, -1], [-1, 4, 3, -1]], np.int32)
    values = rng.standard_normal((3, 4)).astype(np.float32)
    values[0, 0] = -np.inf
    expected = x.copy()
    for r, a in np.argwhere(ids >= 0):
        expected[r, ids[r, a]] = values[r, a]
    given = loaded.array(x, loaded.wide)
    out = loaded.ops.scatter(given, loaded.backend.from_host(ids), loaded.array(values, loaded.wide))
    assert (loaded.numpy(out) == expected).all()
    assert (loaded.numpy(given) == x).all(), "the argument was changed"


def test_from_host_does_not_alias(loaded):
    """The engine reuses its arrays for the next step."""
    host = np.arange(1000, dtype=np.int32)
    device = loaded.backend.from_host(host)
    host[:] = -1
    assert (loaded.numpy(device) == np.arange(1000)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_, np.uint8])
def test_arrays_survive_the_round_trip(loaded, dtype):
    for host in (np.zeros((0, 3), dtype), np.ones((2, 3), dtype), np.asarray([[0, 1], [1, 0]], dtype).T):
        back = loaded.backend.to_host(loaded.backend.from_host(host))
        assert back.dtype == host.dtype
        assert back.shape == host.shape
        assert (back == host).all()
