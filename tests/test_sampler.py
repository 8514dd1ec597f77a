"""The sampler: against float64 references and Transformers, its distribution, and equality between libraries."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support import LIBRARIES, PlainOps, check_frequencies, library, sampling_input

from octavo.core.sampling.adjust import Adjustments
from octavo.core.sampling.params import SamplingParams
from octavo.core.sampling.sampler import sample
from octavo.core.step import SamplerShape, SamplingInput, StepOutput

DRAW = SamplerShape(greedy=False)
FILTER = SamplerShape(greedy=False, filters=True)
INF = float("inf")


def run(name: str, shape: SamplerShape, logits: Any, inputs: SamplingInput, dtype: Any = np.float32) -> StepOutput:
    lib = library(name)
    out = sample(lib.ops, shape, lib.array(np.asarray(logits, dtype)), SamplingInput(*map(lib.array, inputs)))
    out = StepOutput(*map(np.asarray, out))
    assert [a.dtype for a in out] == [np.int32, np.float32, np.int32, np.int32, np.float32]
    return out


def tokens(logits: Any, shape: SamplerShape = DRAW, name: str = "numpy", **fields: Any) -> np.ndarray:
    logits = np.asarray(logits, np.float32)
    adjust = np.asarray(fields["adjust_ids"]).shape[-1] if "adjust_ids" in fields else 0
    return run(name, shape._replace(adjust=adjust), logits, sampling_input(len(logits), adjust, **fields)).tokens


def random_logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


def random_seeds(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, 2)).astype(np.int32)


# ---------------------------------------------------------------------------------------------- greedy


class OnlyArgmax(PlainOps):
    """Refuses every op that a greedy batch has no use for."""

    def top_k(self, *args: Any) -> Any:
        raise AssertionError

    scatter = threshold = gumbel = top_k


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_greedy_is_one_argmax(dtype):
    logits = random_logits(5, 40).astype(dtype)
    out = sample(OnlyArgmax(library("numpy").xp), SamplerShape(), logits, sampling_input(5))
    np.testing.assert_array_equal(out.tokens, logits.argmax(1))
    assert out.tokens.dtype == np.int32
    assert [a.shape for a in out[1:]] == [(0,), (0,), (0, 0), (0, 0)]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [DRAW, FILTER])
def test_a_greedy_row_in_a_drawn_batch_takes_the_argmax(name, shape):
    logits = random_logits(20, 50)
    # neighbours as float32, next to logits that would swallow their difference
    logits[0, :3] = [np.float32(1e-3), np.nextafter(np.float32(1e-3), np.float32(1)), 5e-4]
    logits[0, 3:] = -1e6
    got = tokens(logits, shape, name, temperature=[0, 0.7] * 10, top_k=[0, 0, 5, 5] * 5, seed=random_seeds(20))
    np.testing.assert_array_equal(got[::2], logits.argmax(1)[::2])
    assert (got[1::2] != logits.argmax(1)[1::2]).any()


# ---------------------------------------------------------------------------------------------- draws


def reference_probabilities(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The distribution that is to be sampled, float64, by sorting."""
    x = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-x)
    p = np.exp(x - x.max())
    keep = np.ones(len(x), bool)
    if top_k:
        keep[order[top_k:]] = False
    q = np.where(keep, p, 0) / p[keep].sum()
    for rank in range(1, len(x)):
        if q[order[:rank]].sum() >= top_p:
            keep[order[rank:]] = False
    keep &= p >= min_p
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    list(itertools.product([0.6, 1.0, 1.7], [0, 5], [0.8, 1.0], [0.0, 0.15])),
)
def test_distribution(temperature, top_k, top_p, min_p):
    rows = 20_000
    logits = np.asarray([2.0, -1.0, 0.3, 1.1, 1.9, 0.0, -3.0, 0.7, -INF, 1.3, 0.5, -0.4])
    off = not top_k and top_p == 1 and not min_p
    got = tokens(
        np.tile(logits, (rows, 1)),
        DRAW if off else FILTER,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=random_seeds(rows, 11),
        position=np.arange(rows) % 50,
    )
    check_frequencies(np.bincount(got, minlength=12), reference_probabilities(logits, temperature, top_k, top_p, min_p))


def test_distribution_along_one_sequence():
    """One seed, many positions: as one request draws."""
    logits = random_logits(1, 200, 3)
    got = tokens(np.tile(logits, (20_000, 1)), seed=[7, 0], position=np.arange(20_000))
    p = reference_probabilities(logits[0], 1.0, 0, 1.0, 0.0)
    rare = p * 20_000 < 5
    counts, p = np.bincount(got, minlength=200), np.append(p[~rare], p[rare].sum())
    check_frequencies(np.append(counts[~rare], counts[rare].sum()), p)


def random_batch(seed: int) -> tuple[SamplerShape, np.ndarray, SamplingInput]:
    """A batch that uses everything."""
    random = np.random.default_rng(seed)
    rows, vocab, adjust = 16, int(random.integers(40, 400)), int(random.integers(0, 9))
    ids = np.stack([random.permutation(vocab)[:adjust] for _ in range(rows)])
    ids = np.where(random.random((rows, adjust)) < 0.3, -1, ids)
    inputs = sampling_input(
        rows,
        adjust,
        targets=np.where(random.random(rows) < 0.2, 3, -1),
        temperature=np.where(random.random(rows) < 0.3, 0, random.uniform(0.3, 1.5, rows)),
        top_k=np.where(random.random(rows) < 0.5, 0, random.integers(1, 30, rows)),
        top_p=np.where(random.random(rows) < 0.5, 1, random.uniform(0.1, 1, rows)),
        min_p=np.where(random.random(rows) < 0.5, 0, random.uniform(0, 0.1, rows)),
        seed=random_seeds(rows, seed),
        position=random.integers(0, 5000, rows),
        repetition=random.uniform(0.8, 1.5, rows),
        presence=random.uniform(-1, 1, rows),
        frequency=random.uniform(-1, 1, rows),
        adjust_ids=ids,
        adjust_bias=np.where(random.random((rows, adjust)) < 0.1, -INF, random.normal(size=(rows, adjust))),
        adjust_counts=random.integers(0, 4, (rows, adjust)),
        adjust_seen=random.random((rows, adjust)) < 0.5,
        only_adjusted=random.random(rows) < (0.2 if adjust else 0),
    )
    return SamplerShape(False, True, adjust, 4), random_logits(rows, vocab, seed), inputs


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_libraries_take_the_same_tokens(name):
    for seed in range(40 if name == "torch" else 4):
        shape, logits, inputs = random_batch(seed)
        expected, got = run("numpy", shape, logits, inputs), run(name, shape, logits, inputs)
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_array_equal(got.ranks, expected.ranks)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=1e-4)


def test_it_can_be_traced():
    jax = pytest.importorskip("jax")
    lib = library("jax")
    shape, logits, inputs = random_batch(1)
    out = jax.jit(lambda x, s: sample(lib.ops, shape, x, s))(logits, inputs)
    np.testing.assert_array_equal(out.tokens, run("numpy", shape, logits, inputs).tokens)


def test_a_row_is_the_same_in_any_batch():
    shape, logits, inputs = random_batch(5)
    whole = run("numpy", shape, logits, inputs)
    order = np.random.default_rng(0).permutation(len(logits))
    shuffled = run("numpy", shape, logits[order], SamplingInput(*(a[order] for a in inputs)))
    np.testing.assert_array_equal(shuffled.tokens, whole.tokens[order])
    for row in range(len(logits)):
        alone = run("numpy", shape, logits[row : row + 1], SamplingInput(*(a[row : row + 1] for a in inputs)))
        assert alone.tokens[0] == whole.tokens[row]


def test_a_program_that_can_do_more_takes_the_same_tokens():
    logits, seed = random_logits(30, 100), random_seeds(30)
    plain = run("numpy", DRAW, logits, sampling_input(30, seed=seed)).tokens
    np.testing.assert_array_equal(run("numpy", FILTER, logits, sampling_input(30, seed=seed)).tokens, plain)
    everything = SamplerShape(False, True, 3, 2)
    np.testing.assert_array_equal(run("numpy", everything, logits, sampling_input(30, 3, seed=seed)).tokens, plain)


def test_seed_and_position_decide():
    logits = np.zeros((1, 1000))
    draws = {int(tokens(logits, seed=[s, h], position=p)[0]) for s in range(3) for h in range(3) for p in range(3)}
    assert len(draws) > 20


# ---------------------------------------------------------------------------------------------- hostile logits


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [SamplerShape(logprobs=2), DRAW, FILTER])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_any_logits_give_a_token_of_the_vocabulary(name, shape):
    logits = np.zeros((5, 30), np.float32)
    logits[0] = np.nan
    logits[1, 7] = np.nan
    logits[2] = -INF
    logits[3, 4] = INF
    logits[4] = 1e30
    got = run(name, shape, logits, sampling_input(5, top_p=0.9)).tokens
    assert ((got >= 0) & (got < 30)).all()
    assert got[3] == 4


def test_extreme_temperatures_and_logits():
    logits = random_logits(50, 30)
    cold = tokens(logits, temperature=1e-6, seed=random_seeds(50))
    np.testing.assert_array_equal(cold, logits.argmax(1))
    logits *= np.float32(1e30)
    np.testing.assert_array_equal(tokens(logits, FILTER, temperature=0.01, top_p=0.99), logits.argmax(1))
    hot = tokens(np.tile([[1.0, 0, 0, -1.0]], (8000, 1)), temperature=100.0, seed=random_seeds(8000))
    check_frequencies(np.bincount(hot), reference_probabilities([1.0, 0, 0, -1.0], 100.0, 0, 1.0, 0.0))


# ---------------------------------------------------------------------------------------------- adjustments


@pytest.mark.parametrize("name", LIBRARIES)
def test_adjustments_follow_their_definition(name):
    """Bias, then repetition penalty, then frequency and presence penalty, seen in the greedy token's logit."""
    random = np.random.default_rng(8)
    for trial in range(20):
        vocab, logits = 12, random_logits(1, 12, trial)
        ids = random.permutation(vocab)[:6]
        bias, counts, seen = random.normal(size=6) * 2, random.integers(0, 3, 6), random.random(6) < 0.5
        expected = logits[0].astype(np.float64)
        for token, b, count, is_seen in zip(ids, bias, counts, seen, strict=True):
            x = expected[token] + b
            if is_seen:
                x = x / 1.7 if x > 0 else x * 1.7
            expected[token] = x - 0.9 * count - (0.8 if count else 0)
        fields: dict[str, Any] = {
            "repetition": 1.7,
            "frequency": 0.9,
            "presence": 0.8,
            "adjust_ids": [ids],
            "adjust_bias": [bias],
            "adjust_counts": [counts],
            "adjust_seen": [seen],
        }
        assert tokens(logits, SamplerShape(), name, **fields)[0] == expected.argmax()
        only = tokens(logits, SamplerShape(), name, **fields, only_adjusted=True)[0]
        assert only == ids[expected[ids].argmax()]


def test_repetition_penalty_of_transformers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logits, context = random_logits(40, 30), np.random.default_rng(1).integers(0, 30, (40, 20))
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.8)(
        torch.from_numpy(context), torch.from_numpy(logits.copy())
    )
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    got = []
    for row, ids in zip(logits, context, strict=True):
        adjustments = Adjustments(params, ids[:15], (), 30)
        for token in ids[15:]:
            adjustments.observe(int(token))
        e = adjustments.entries(5)
        fields = {"adjust_ids": [e.ids], "adjust_bias": [e.bias], "adjust_counts": [e.counts], "adjust_seen": [e.seen]}
        got.append(tokens([row], SamplerShape(), repetition=1.8, **fields)[0])
    np.testing.assert_array_equal(got, expected.argmax(-1).numpy())
    assert (np.asarray(got) != logits.argmax(1)).any()


def test_bans_hold_under_any_noise():
    rows = 500
    ids = np.tile([3, 5, -1], (rows, 1))
    got = tokens(np.zeros((rows, 8)), FILTER, seed=random_seeds(rows), adjust_ids=ids, adjust_bias=-INF)
    assert set(got.tolist()) == {0, 1, 2, 4, 6, 7}
    got = tokens(np.zeros((rows, 8)), FILTER, seed=random_seeds(rows), adjust_ids=ids, only_adjusted=True)
    assert set(got.tolist()) == {3, 5}


# ---------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("alternatives", [0, 1, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logprobs_are_those_of_the_unadjusted_logits(name, alternatives, dtype):
    if name == "jax" and dtype is np.float64:
        pytest.skip("JAX without x64 has no float64")
    logits = (random_logits(10, 60) + 100).astype(dtype)
    logits[:, 9] = -INF
    shape = SamplerShape(False, True, 1, alternatives)
    inputs = sampling_input(10, 1, temperature=0.5, adjust_ids=2, adjust_bias=5, seed=random_seeds(10), top_k=20)
    out = run(name, shape, logits, inputs, dtype)
    x = logits.astype(np.float64)
    reference = x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
    chosen = reference[np.arange(10), out.tokens]
    np.testing.assert_allclose(out.logprobs, chosen, atol=2e-5)
    np.testing.assert_array_equal(out.ranks, (reference > chosen[:, None]).sum(1) + 1)
    order = np.argsort(-reference, axis=1)[:, :alternatives]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(reference, order, 1), atol=2e-5)


@pytest.mark.parametrize("shape", [SamplerShape(logprobs=0), FILTER._replace(logprobs=0)])
def test_targets_are_taken_as_they_are(shape):
    logits = random_logits(4, 20)
    out = run("numpy", shape, logits, sampling_input(4, targets=[-1, 5, 0, 19], temperature=0))
    assert out.tokens.tolist() == [logits[0].argmax(), 5, 0, 19]
    assert out.ranks[0] == 1
    assert out.ranks[1] == (logits[1] > logits[1, 5]).sum() + 1
