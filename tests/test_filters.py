"""Top-k, top-p and min-p against sorting in float64, against Transformers, and on hostile logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LIBRARIES, library

from octavo.core.sampling import filters

EPS = 1e-5


def kept_by(name: str, logits, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Which logits the threshold keeps: bool [R, V]. Also checks that the threshold is a logit of its row."""
    lib = library(name)
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = len(logits)
    fields = [
        lib.array(np.array(np.broadcast_to(np.asarray(v, d), rows)))
        for v, d in ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32))
    ]
    threshold = np.asarray(filters.threshold(lib.xp, lib.array(logits), *fields))
    assert threshold.dtype == np.float32
    assert threshold.shape == (rows, 1)
    assert (logits == threshold).any(axis=1).all()
    return logits >= threshold


def check_row(logits: np.ndarray, kept: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """Checks one row's kept set against the definitions, by sorting, in float64.

    Sums of probabilities within EPS of p may fall on either side.
    """
    x = logits.astype(np.float64)
    finite = x > -np.inf
    if not finite.any():
        assert kept.all()
        return
    assert kept[x.argmax()]
    assert not kept[~finite].any()
    by_rank = finite
    if top_k:
        ordered = np.sort(x)[::-1]
        by_rank = finite & (x >= ordered[min(top_k, len(x)) - 1])
    p = np.where(by_rank, np.exp(np.where(by_rank, x, x.max()) - x.max()), 0.0)
    ratio, p = p, p / p.sum()
    must, may = by_rank.copy(), by_rank.copy()  # what is kept at least and at most
    if np.float32(top_p) < 1:
        likelier = np.asarray([p[x > value].sum() for value in x])  # mass before the token's value is reached
        must &= likelier < np.float32(top_p) - EPS
        may &= likelier < np.float32(top_p) + EPS
    if min_p:
        must &= ratio > min_p * (1 + EPS)
        may &= ratio >= min_p * (1 - EPS)
    must[x == x.max()] = may[x == x.max()] = True
    assert not (must & ~kept).any()
    assert not (kept & ~may).any()


@pytest.mark.parametrize("name", LIBRARIES)
def test_random_rows(name):
    random = np.random.default_rng(3)
    rows, vocab = 200, 300
    logits = random.normal(size=(rows, vocab)) * random.uniform(0.1, 10, (rows, 1))
    logits[::3] = np.round(logits[::3])  # ties
    logits[random.random((rows, vocab)) < 0.1] = -np.inf
    logits = logits.astype(np.float32)
    top_k = random.integers(1, vocab, rows) * (random.random(rows) < 0.6)
    top_p = np.where(random.random(rows) < 0.6, random.uniform(0.01, 1, rows), 1.0)
    min_p = np.where(random.random(rows) < 0.5, random.uniform(0, 0.3, rows), 0.0)
    kept = kept_by(name, logits, top_k, top_p, min_p)
    for row in range(rows):
        check_row(logits[row], kept[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))


def test_libraries_agree():
    library("torch")
    random = np.random.default_rng(4)
    logits = (random.normal(size=(64, 500)) * 3).astype(np.float32)
    top_k, top_p = random.integers(0, 50, 64), random.uniform(0.1, 1, 64)
    min_p = random.uniform(0, 0.1, 64)
    np.testing.assert_array_equal(
        kept_by("numpy", logits, top_k, top_p, min_p), kept_by("torch", logits, top_k, top_p, min_p)
    )


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.05), (20, 0.8, 0.0), (30, 0.9, 0.02)],
)
def test_transformers_warpers(top_k, top_p, min_p):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logits = (np.random.default_rng(5).normal(size=(50, 200)) * 2).astype(np.float32)
    scores = torch.from_numpy(logits)
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = transformers.MinPLogitsWarper(min_p)(None, scores)
    expected = (scores > -torch.inf).numpy()
    # float32 sums may differ at the boundary; with this seed they do not
    np.testing.assert_array_equal(kept_by("numpy", logits, top_k, top_p, min_p), expected)


def test_ties_at_the_boundary_are_kept():
    assert kept_by("numpy", [3, 2, 2, 2, 1], top_k=2).tolist() == [[True, True, True, True, False]]
    assert kept_by("numpy", [0, 0, 0, 0], top_p=0.5).all()
    assert kept_by("numpy", [5, 5, 1, 1], min_p=1.0).tolist() == [[True, True, False, False]]


def test_top_p_acts_on_what_top_k_left():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    # 0.4 / 0.7 = 0.57 reaches 0.5 once top-k has dropped the rest; alone it does not.
    assert kept_by("numpy", logits, top_k=2, top_p=0.5).sum() == 1
    assert kept_by("numpy", logits, top_p=0.5).sum() == 2


def test_filters_that_are_off_keep_all_but_banned_tokens():
    logits = np.asarray([[1e30, -1e30, -np.inf, 0, -3.4e38]], np.float32)
    assert kept_by("numpy", logits).tolist() == [[True, True, False, True, True]]
    assert kept_by("numpy", [[-np.inf] * 3], top_k=1, top_p=0.1, min_p=0.5).all()


def test_a_row_does_not_depend_on_its_neighbours():
    random = np.random.default_rng(6)
    logits = random.normal(size=(20, 100)).astype(np.float32)
    top_k, top_p = random.integers(0, 20, 20), random.uniform(0.1, 1, 20)
    kept = kept_by("numpy", logits, top_k, top_p)
    for row in range(20):
        np.testing.assert_array_equal(kept[row], kept_by("numpy", logits[row], top_k[row], top_p[row])[0])


def test_values_that_are_neighbours_as_float32_are_told_apart():
    x = np.float32(-1.0)
    ladder = [np.float32(1e30)]
    for _ in range(5):
        ladder.append(x)
        x = np.nextafter(x, np.float32(-np.inf))
    for k in range(1, 7):
        assert kept_by("numpy", [ladder], top_k=k).sum() == k


def test_order_codes_cover_float32_exactly():
    lib = library("numpy")
    random = np.random.default_rng(7)
    codes = random.integers(0, 0x7F800000, 10_000).astype(np.int32)
    codes = np.concatenate([codes, [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF]]).astype(np.int32)
    powers = np.asarray(filters._POWERS, np.float32)
    np.testing.assert_array_equal(filters._float_of(lib.xp, codes[:, None], powers)[:, 0], codes.view(np.float32))
    np.testing.assert_array_equal(filters._float_of(lib.xp, -codes[:, None], powers)[:, 0], -codes.view(np.float32))


hostile = st.one_of(
    st.floats(-(2.0**126), 2.0**126, width=32),
    st.floats(-50, 50, width=32),
    st.sampled_from([-float("inf"), 0.0, -0.0, 1.0, 1.0, 2.0, 1e30, -1e30, 1e-40]),
)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(hostile, min_size=1, max_size=12),
    top_k=st.integers(0, 15),
    top_p=st.one_of(st.just(1.0), st.floats(2.0**-20, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1.0, width=32)),
)
def test_any_logits(name, logits, top_k, top_p, min_p):
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        kept = kept_by(name, logits, top_k, top_p, min_p)
    check_row(np.asarray(logits, np.float32), kept[0], top_k, top_p, min_p)
