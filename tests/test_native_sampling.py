"""Draws by the compiled CPU kernels: the tokens that NumPy takes, and the distribution that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from support import check_frequencies, sampling_input
from support import library as array_library
from test_sampler import random_seeds, reference_probabilities

torch = pytest.importorskip("torch")

from octavo.backends.cpu.native.ops import NativeOps  # noqa: E402
from octavo.core.sampling.sampler import sample  # noqa: E402
from octavo.core.step import SamplerShape, SamplingInput  # noqa: E402

INF = float("inf")
GREEDY = SamplerShape()
DRAW = SamplerShape(greedy=False)
FILTER = SamplerShape(greedy=False, filters=True)


@pytest.fixture
def ops(native_library):
    return NativeOps(native_library)


def tokens(ops, shape, logits, inputs):
    given = SamplingInput(*(torch.from_numpy(a) for a in inputs))
    return sample(ops, shape, torch.from_numpy(logits), given).tokens.numpy()


def expected(shape, logits, inputs):
    return sample(array_library("numpy").ops, shape, logits, inputs).tokens


@pytest.mark.parametrize("vocab", [1, 7, 16, 129, 5000])
@pytest.mark.parametrize("scale", [0.3, 4.0, 40.0], ids="scale {}".format)
def test_tokens_are_numpys(ops, vocab, scale):
    """Few draws in thousands may differ: where the last bit of a logarithm or of a sum decides."""
    rows, random, differ = 64, np.random.default_rng(vocab), 0
    for turn in range(10):
        logits = (random.standard_normal((rows, vocab)) * scale).astype(np.float32)
        logits[random.random(logits.shape) < 0.1] = -INF
        logits[random.random(logits.shape) < 0.1] = scale  # ties
        off = lambda value, other: np.where(random.random(rows) < 0.4, value, other)  # noqa: E731
        inputs = sampling_input(
            rows,
            temperature=off(0, random.uniform(0.2, 2.5, rows)),
            top_k=off(0, random.integers(1, 2 * vocab + 1, rows)),
            top_p=off(1, random.uniform(0.05, 1, rows)),
            min_p=off(0, random.uniform(0, 0.5, rows)),
            seed=random_seeds(rows, turn),
            position=random.integers(0, 9000, rows),
        )
        np.testing.assert_array_equal(tokens(ops, GREEDY, logits, inputs), expected(GREEDY, logits, inputs))
        for shape in (DRAW, FILTER):
            got, want = tokens(ops, shape, logits, inputs), expected(shape, logits, inputs)
            greedy = inputs.temperature == 0
            np.testing.assert_array_equal(got[greedy], want[greedy])
            differ += (got != want).sum()
    assert differ <= 2


def test_noise_is_numpys(ops):
    seeds, positions = random_seeds(20), np.arange(20, dtype=np.int32)
    got = ops.gumbel(torch.from_numpy(seeds), torch.from_numpy(positions), 4999).numpy()
    want = array_library("numpy").ops.gumbel(seeds, positions, 4999)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1, 8, 0.9, 0.1)],
)
def test_distribution(ops, temperature, top_k, top_p, min_p):
    rows = 20_000
    logits = np.asarray([2.0, -1.0, 0.3, 1.1, 1.9, 0.0, -3.0, 0.7, -INF, 1.3, 0.5, -0.4], np.float32)
    inputs = sampling_input(
        rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=random_seeds(rows, 3),
        position=np.arange(rows) % 70,
    )  # fmt: skip
    got = tokens(ops, FILTER, np.tile(logits, (rows, 1)), inputs)
    check_frequencies(np.bincount(got, minlength=12), reference_probabilities(logits, temperature, top_k, top_p, min_p))


def test_a_flat_distribution_is_cut_where_it_should_be(ops):
    """Far more tokens are kept than any head of the distribution has, and some below the first cut of the search."""
    vocab, rows = 40_000, 30
    logits = np.tile(np.linspace(0, -20, vocab, dtype=np.float32), (rows, 1))
    for top_k, top_p in ((35_000, 1.0), (0, 0.9999999), (39_999, 0.99)):
        inputs = sampling_input(rows, top_k=top_k, top_p=top_p, seed=random_seeds(rows), position=np.arange(rows))
        np.testing.assert_array_equal(tokens(ops, FILTER, logits, inputs), expected(FILTER, logits, inputs))


@pytest.mark.parametrize("shape", [GREEDY, DRAW, FILTER], ids=str)
def test_what_is_no_number_gives_some_token(ops, shape):
    logits = np.zeros((4, 33), np.float32)
    logits[0] = np.nan
    logits[1] = -INF
    logits[2, 5:] = np.nan
    logits[3, 20] = INF
    got = tokens(ops, shape, logits, sampling_input(4, top_k=3, top_p=0.9, min_p=0.1))
    assert ((got >= 0) & (got < 33)).all()
    assert got[3] == 20
