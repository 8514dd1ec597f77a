"""The sampler on the device against NumPy in float64, and against itself in other batches."""

import numpy as np
import pytest

from octavo.core.backend import StepLimits
from octavo.core.sampling.sampler import sample
from octavo.core.step import SamplerShape, SamplingInput, map_arrays
from octavo.testing import reference
from octavo.testing.models import tiny_spec
from octavo.testing.numbers import assert_close

VOCAB = 1531  # more than an implementation that looks at a head of the distribution first would look at
LIMITS = StepLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=16)


@pytest.fixture(scope="module")
def loaded(kit):
    return kit.load(tiny_spec(), LIMITS, num_blocks=4)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def rows(rng, count, adjust=0):
    """Sampling inputs of `count` rows that sample at temperature 1 and nothing more."""
    return SamplingInput(
        out_slots=np.zeros(count, np.int32),
        targets=np.full(count, -1, np.int32),
        temperature=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=rng.integers(-(2**31), 2**31, (count, 2)).astype(np.int32),
        position=rng.integers(0, 5000, count).astype(np.int32),
        repetition=np.ones(count, np.float32),
        presence=np.zeros(count, np.float32),
        frequency=np.zeros(count, np.float32),
        adjust_ids=np.full((count, adjust), -1, np.int32),
        adjust_bias=np.zeros((count, adjust), np.float32),
        adjust_counts=np.zeros((count, adjust), np.int32),
        adjust_seen=np.zeros((count, adjust), bool),
        only_adjusted=np.zeros(count, bool),
    )


def run(loaded, shape, logits, inputs):
    given = loaded.array(logits, loaded.wide)
    output = sample(loaded.ops, shape, given, map_arrays(loaded.backend.from_host, inputs))
    assert (loaded.numpy(given) == logits).all(), "the logits were changed"
    return map_arrays(loaded.backend.to_host, output)


def check_tokens(tokens, logits, inputs):
    """Each token has the best score; where float32 rounding decides between two, either will do."""
    assert tokens.dtype == np.int32
    for r, token in enumerate(tokens):
        row = {name: value[r] for name, value in inputs._asdict().items()}
        scores = reference.scores(logits[r].astype(np.float64), row)
        assert scores[token] >= scores.max() - 1e-4, f"row {r} has token {token}, expected {scores.argmax()}"


def float32_logits(rng, count, spread=2.0):
    return (rng.standard_normal((count, VOCAB)) * spread).astype(np.float32)


def test_noise_has_the_bits_that_the_contract_says(loaded, rng):
    inputs = rows(rng, 5)
    seed, position = (loaded.backend.from_host(x) for x in (inputs.seed, inputs.position))
    noise = loaded.numpy(loaded.ops.gumbel(seed, position, VOCAB))
    expected = np.stack([reference.gumbel(inputs.seed[r], inputs.position[r], VOCAB) for r in range(5)])
    assert_close(noise, expected, "float32", 8)
    # Noise is one-to-one in the bits, so the order of a row's tokens shows that they are the same.
    agree = np.argsort(noise, axis=1) == np.argsort(expected, axis=1)
    assert agree.mean() > 0.99


def test_threshold(loaded, rng):
    """All combinations of the filters, on flat, peaked, tied and partly banned rows."""
    cases = [(k, p, m) for k in (0, 1, 7, 300, VOCAB, 10**6) for p in (1.0, 0.9, 0.5, 1e-6) for m in (0.0, 0.05, 1.0)]
    kinds = [
        float32_logits(rng, 1, 0.01)[0],
        float32_logits(rng, 1, 3.0)[0],
        rng.integers(-3, 4, VOCAB).astype(np.float32),
        np.where(rng.random(VOCAB) < 0.7, -np.inf, float32_logits(rng, 1)[0]).astype(np.float32),
        np.zeros(VOCAB, np.float32),
        np.where(np.arange(VOCAB) == 77, 0.0, -np.inf).astype(np.float32),
    ]
    logits = np.stack([kind - kind.max() for kind in kinds for _ in cases])
    top_k, top_p, min_p = (np.asarray(values) for values in zip(*(cases * len(kinds)), strict=True))
    device = loaded.backend.from_host
    least = loaded.numpy(
        loaded.ops.threshold(
            device(logits),
            device(top_k.astype(np.int32)),
            device(top_p.astype(np.float32)),
            device(min_p.astype(np.float32)),
        )
    )
    assert least.shape == (len(logits), 1)
    for r, row in enumerate(logits):
        keep = reference.kept(row.astype(np.float64), int(top_k[r]), float(np.float32(top_p[r])), float(min_p[r]))
        got = row >= least[r, 0]
        case = f"kind {r // len(cases)}, top_k {top_k[r]}, top_p {top_p[r]}, min_p {min_p[r]}"
        # Where the mass is reached only just, the rounding of float32 sums may decide for one value more or less.
        weights = np.exp(row.astype(np.float64))
        disputed = np.unique(row[keep != got])
        assert len(disputed) <= 1 or weights[keep != got].sum() < 1e-5 * weights.sum(), case
        if top_p[r] == 1.0:
            assert not len(disputed), case
        assert least[r, 0] in row, f"{case}: not a logit of the row"


def test_greedy(loaded, rng):
    logits, inputs = float32_logits(rng, 6), rows(rng, 6)
    inputs.temperature[:] = 0
    output = run(loaded, SamplerShape(), logits, inputs)
    assert (output.tokens == logits.argmax(axis=1)).all()
    assert output.logprobs.size == output.ranks.size == output.top_ids.size == output.top_logprobs.size == 0


def test_temperature_and_greedy_rows_together(loaded, rng):
    logits, inputs = float32_logits(rng, 24), rows(rng, 24)
    inputs.temperature[:] = np.tile([0.0, 1e-3, 0.3, 1.0, 1.7, 100.0], 4)
    output = run(loaded, SamplerShape(greedy=False), logits, inputs)
    check_tokens(output.tokens, logits, inputs)
    assert (output.tokens[::6] == logits[::6].argmax(axis=1)).all()


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_filters(loaded, rng, spread):
    logits, inputs = float32_logits(rng, 48, spread), rows(rng, 48)
    inputs.top_k[:] = rng.choice([0, 1, 5, 50, 400], 48)
    inputs.top_p[:] = rng.choice([1.0, 0.95, 0.6], 48)
    inputs.min_p[:] = rng.choice([0.0, 0.1], 48)
    inputs.temperature[:] = rng.choice([0.0, 0.7, 1.0, 2.0], 48)
    check_tokens(run(loaded, SamplerShape(greedy=False, filters=True), logits, inputs).tokens, logits, inputs)


@pytest.mark.parametrize("greedy", [True, False])
def test_adjustments(loaded, rng, greedy):
    count, entries = 16, 9
    logits, inputs = float32_logits(rng, count), rows(rng, count, entries)
    for r in range(count):
        # The likeliest tokens are the ones adjusted, so that it matters; the last entries are unused.
        inputs.adjust_ids[r, :-2] = np.argsort(-logits[r])[: entries - 2]
    inputs.adjust_bias[:] = rng.choice([0.0, -np.inf, 1.5, -2.0], (count, entries))
    inputs.adjust_counts[:] = rng.integers(0, 4, (count, entries))
    inputs.adjust_seen[:] = rng.random((count, entries)) < 0.5
    inputs.repetition[:] = rng.choice([1.0, 1.3, 0.8], count)
    inputs.presence[:] = rng.choice([0.0, 0.7, -0.7], count)
    inputs.frequency[:] = rng.choice([0.0, 0.4, -0.4], count)
    inputs.only_adjusted[:] = rng.random(count) < 0.3
    inputs.adjust_bias[:, 0] = 0.5  # something is left where only adjusted tokens are allowed
    if greedy:
        inputs.temperature[:] = 0
    shape = SamplerShape(greedy=greedy, adjust=entries)
    check_tokens(run(loaded, shape, logits, inputs).tokens, logits, inputs)


@pytest.mark.parametrize("alternatives", [0, 1, 7])
def test_logprobs(loaded, rng, alternatives):
    logits, inputs = float32_logits(rng, 8), rows(rng, 8)
    inputs.temperature[:] = np.tile([0.0, 5.0], 4)
    shape = SamplerShape(greedy=False, logprobs=alternatives)
    output = run(loaded, shape, logits, inputs)
    check_tokens(output.tokens, logits, inputs)
    expected = reference.log_softmax(logits.astype(np.float64))
    at = np.arange(8)
    assert_close(output.logprobs, expected[at, output.tokens], "float32", 8, "logprobs")
    assert (output.ranks == 1 + (logits > logits[at, output.tokens][:, None]).sum(axis=1)).all()
    assert output.top_ids.shape == output.top_logprobs.shape == (8, alternatives)
    assert (output.top_ids == np.argsort(-logits, axis=1, kind="stable")[:, :alternatives]).all()
    if alternatives:
        assert_close(output.top_logprobs, -np.sort(-expected, axis=1)[:, :alternatives], "float32", 8, "top")


def test_targets(loaded, rng):
    """Prompt log-probabilities: the token is given, its log-probability is wanted."""
    logits, inputs = float32_logits(rng, 4), rows(rng, 4)
    inputs.targets[:] = [0, VOCAB - 1, -1, 5]
    inputs.temperature[:] = 0
    output = run(loaded, SamplerShape(logprobs=0), logits, inputs)
    assert (output.tokens == [0, VOCAB - 1, logits[2].argmax(), 5]).all()
    expected = reference.log_softmax(logits.astype(np.float64))[np.arange(4), output.tokens]
    assert_close(output.logprobs, expected, "float32", 8)


def test_draws_do_not_depend_on_the_batch(loaded, rng):
    logits, inputs = float32_logits(rng, 12), rows(rng, 12)
    inputs.top_p[:] = np.tile([1.0, 0.8], 6)
    shape = SamplerShape(greedy=False, filters=True)
    together = run(loaded, shape, logits, inputs).tokens
    order = rng.permutation(12)
    shuffled = run(loaded, shape, logits[order], SamplingInput(*(field[order] for field in inputs))).tokens
    assert (shuffled == together[order]).all()
    for r in range(12):
        alone = run(loaded, shape, logits[r : r + 1], SamplingInput(*(field[r : r + 1] for field in inputs)))
        assert alone.tokens[0] == together[r]
