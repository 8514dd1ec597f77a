"""The noise: known answers, an independent implementation, statistics, and equality between libraries."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from support import LIBRARIES, check_frequencies, library

from octavo.core.sampling import rng

MASK = 0xFFFFFFFF

# Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def words(*values: int) -> list[np.ndarray]:
    return [np.asarray([v & MASK], np.uint32).view(np.int32) for v in values]


def numpy_bits(seeds, positions, vocab_size: int) -> np.ndarray:
    seed = np.asarray([rng.split_seed(int(s)) for s in seeds], np.int32)
    bits = rng.random_bits(library("numpy").xp, seed, np.asarray(positions, np.int32), vocab_size)
    return bits.view(np.uint32)


def python_bits(seed: int, position: int, token: int) -> int:
    """The definition once more, in unbounded unsigned integers."""
    key = [seed & MASK, seed >> 32 & MASK]
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (position + key[0]) & MASK, key[1]
    for group in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = (x + y) & MASK
            y = ((y << bits | y >> (32 - bits)) & MASK) ^ x
        x = (x + schedule[(group + 1) % 3]) & MASK
        y = (y + schedule[(group + 2) % 3] + group + 1) & MASK
    h = (token * 0x9E3779B9 + x) & MASK
    h = (h ^ h >> 16) * 0x7FEB352D & MASK ^ y
    h = (h ^ h >> 15) * 0x846CA68B & MASK
    return h ^ h >> 16


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_threefry_known_answers(name, counter, key, expected):
    lib = library(name)
    key, counter = [tuple(lib.array(w) for w in words(*pair)) for pair in (key, counter)]
    out = rng.threefry2x32(key, counter)
    assert tuple(int(word[0]) & MASK for word in out) == expected


@pytest.mark.parametrize("name", LIBRARIES)
def test_bits_follow_the_definition(name):
    lib, random = library(name), np.random.default_rng(1)
    seeds = [0, 1, -1, 2**64 - 1, 2**63, *(int(s) for s in random.integers(-(2**63), 2**63, 20))]
    positions = np.concatenate([[0, 2**31 - 1], random.integers(0, 2**20, len(seeds) - 2)]).astype(np.int32)
    seed = lib.array(np.asarray([rng.split_seed(s) for s in seeds], np.int32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns of an overflow of scalars
        bits = np.asarray(rng.random_bits(lib.xp, seed, lib.array(positions), 50))
    assert bits.dtype == np.int32
    expected = [[python_bits(s, int(p), t) for t in range(50)] for s, p in zip(seeds, positions, strict=True)]
    np.testing.assert_array_equal(bits.view(np.uint32), np.asarray(expected, np.uint32))


def test_draws_never_change():
    """Stored seeds must draw the same tokens in every release: these numbers are a promise."""
    bits = numpy_bits([0x0123456789ABCDEF], [7], 4)
    assert [hex(int(b)) for b in bits[0]] == ["0xef22fc82", "0x29cf76ff", "0xb5cfcbcb", "0x17725889"]
    children = [hex(rng.child_seed(42, index)) for index in range(3)]
    assert children == ["0x2a", "0x98c80de0b3971280", "0x8248469dec08a7fb"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_gumbel_is_the_same_in_every_library(name):
    lib, random = library(name), np.random.default_rng(2)
    seed = random.integers(-(2**31), 2**31, (8, 2)).astype(np.int32)
    position = random.integers(0, 2**20, 8).astype(np.int32)
    noise = np.asarray(rng.gumbel(lib.xp, lib.array(seed), lib.array(position), 5000))
    assert noise.dtype == np.float32
    assert noise.shape == (8, 5000)
    bits = rng.random_bits(library("numpy").xp, seed, position, 5000).view(np.uint32).astype(np.float64)
    u = np.minimum(((bits + 0.5) / 2**32).astype(np.float32), 1 - 2**-24).astype(np.float64)
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-u)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", LIBRARIES)
def test_uniform_is_precise_near_0_and_below_1(name):
    lib = library(name)
    bits = np.asarray([0, 1, 2, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, MASK], np.uint32)
    u = np.asarray(rng.uniform(lib.xp, lib.array(bits.view(np.int32)))).astype(np.float64)
    exact = (bits.astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(u[:-1], exact[:-1], rtol=2**-24)
    assert u[0] == 2.0**-33
    assert u[-1] == 1 - 2.0**-24


def test_uniform_and_gumbel_moments():
    xp = library("numpy").xp
    bits = numpy_bits(range(64), [3] * 64, 4096)
    counts = np.bincount((bits >> 22).ravel(), minlength=1024)
    check_frequencies(counts, np.full(1024, 1 / 1024))
    counts = np.bincount((bits & 1023).ravel(), minlength=1024)
    check_frequencies(counts, np.full(1024, 1 / 1024))
    seed = np.asarray([(s, 0) for s in range(64)], np.int32)
    noise = rng.gumbel(xp, seed, np.full(64, 3, np.int32), 4096).astype(np.float64)
    sigma = math.pi / math.sqrt(6)
    assert abs(noise.mean() - np.euler_gamma) < 4 * sigma / math.sqrt(noise.size)
    assert abs(noise.std() - sigma) < 0.01


NEIGHBOURS = {
    "positions": (lambda n: (np.full(n, 5), np.arange(n)), 0),
    "seeds": (lambda n: (np.arange(n), np.full(n, 5)), 0),
    "high words of seeds": (lambda n: (np.arange(n) << 32, np.full(n, 5)), 0),
    "seed and position together": (lambda n: (np.arange(n), np.arange(n)), 0),
    "seed against position": (lambda n: (np.arange(n), np.arange(n)[::-1]), 0),
    "tokens": (lambda n: (np.arange(n), np.arange(n)), 1),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
@pytest.mark.parametrize("shift", [28, 0])
def test_neighbours_are_independent(what, shift):
    """Chi-square of the joint distribution of 4 bits of neighbouring draws, high and low bits."""
    make, axis = NEIGHBOURS[what]
    nibbles = (numpy_bits(*make(513), 513) >> shift & 15).astype(np.int64)
    pairs = nibbles[1:] * 16 + nibbles[:-1] if axis == 0 else nibbles[:, 1:] * 16 + nibbles[:, :-1]
    check_frequencies(np.bincount(pairs.ravel(), minlength=256), np.full(256, 1 / 256))


@pytest.mark.parametrize("bit", [0, 1, 7, 15, 31, 32, 47, 63])
def test_each_seed_bit_changes_half_of_the_bits(bit):
    seeds = np.arange(200)
    flipped = [int(s) ^ 1 << bit for s in seeds]
    changed = numpy_bits(seeds, seeds, 100) ^ numpy_bits(flipped, seeds, 100)
    rate = np.unpackbits(changed.view(np.uint8)).mean()
    assert abs(rate - 0.5) < 0.005


def test_tokens_of_a_row_never_tie():
    assert len(np.unique(numpy_bits([9], [9], 200_000))) == 200_000


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0x80000000])
def test_split_seed_keeps_all_64_bits(seed):
    low, high = rng.split_seed(seed)
    assert all(-(2**31) <= word < 2**31 for word in (low, high))
    assert (high & MASK) << 32 | (low & MASK) == seed % 2**64


def test_child_seeds():
    assert rng.child_seed(1234, 0) == 1234
    assert rng.child_seed(-1, 0) == 2**64 - 1
    seeds = {rng.child_seed(seed, index) for seed in range(-5, 20) for index in range(128)}
    assert len(seeds) == 25 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
