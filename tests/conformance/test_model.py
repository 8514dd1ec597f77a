"""Whole models through the paged cache, in chunks and token by token, against a plain float64 forward pass."""

import numpy as np
import pytest

from octavo.core.backend import StepLimits
from octavo.core.step import SamplerShape
from octavo.testing import reference
from octavo.testing.models import tiny_spec
from octavo.testing.numbers import EPSILON, assert_close
from octavo.testing.simulator import Simulator

LIMITS = StepLimits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128, block_size=16)
NUM_BLOCKS = 64
# In units of epsilon at the largest logit: two layers of rounding each intermediate, at least twice what was measured.
UNITS = {"float64": 32, "float32": 16, "float16": 4, "bfloat16": 4}

MODELS = {
    "llama": tiny_spec(),
    "llama, tied, one key head": tiny_spec(num_heads=4, num_kv_heads=1, tie_embeddings=True),
    "biases everywhere": tiny_spec(qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": tiny_spec(family="mistral", sliding_window=(24, 24)),
    "qwen2": tiny_spec(family="qwen2", qkv_bias=True, sliding_window=(None, 20), activation="gelu_tanh"),
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(kit, request):
    model = MODELS[request.param]
    if any(model.sliding_window) and not kit.create().capabilities().attention.sliding_window:
        pytest.skip("the device has no sliding window")
    return kit.load(model, LIMITS, NUM_BLOCKS, warm=True)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def expected_logits(loaded, tokens):
    return reference.decoder(loaded.model, loaded.parameter, np.asarray(tokens))


def test_chunks_and_single_tokens(loaded, rng):
    """Prompts in random chunks of mixed steps, then tokens one by one: each row of logits as if computed at once."""
    loaded.reset_cache()
    simulator = Simulator(loaded)
    texts = [rng.integers(0, loaded.model.vocab_size, n).tolist() for n in (70, 3, 33, 16)]
    expected = [expected_logits(loaded, text) for text in texts]
    streams = [simulator.open() for _ in texts]
    while any(stream.length < len(text) for stream, text in zip(streams, texts, strict=True)):
        work = []
        for stream, text in zip(streams, texts, strict=True):
            left = len(text) - stream.length
            # Near its end a text goes token by token, as if decoded.
            if left and rng.random() < 0.8:
                count = 1 if left <= 4 else int(rng.integers(1, min(left - 3, 30) + 1))
                work.append((stream, text[stream.length : stream.length + count]))
        if not work:
            continue
        logits = simulator.logits(work)
        for (stream, _), row in zip(work, logits, strict=True):
            want = expected[stream.slot][stream.length - 1]
            assert_close(row, want, loaded.dtype, UNITS[loaded.dtype], f"position {stream.length - 1}")


def test_tokens_stay_on_the_device(loaded, rng):
    """Decoding from `Cache.sampled`, two steps in flight where the device allows, gives the tokens of the texts."""
    loaded.reset_cache()
    simulator = Simulator(loaded)
    backend = loaded.backend
    streams = [simulator.open() for _ in range(3)]
    texts = [rng.integers(0, loaded.model.vocab_size, n).tolist() for n in (20, 41, 5)]
    for stream, text in zip(streams, texts, strict=True):
        text.append(int(simulator.run([(stream, text)]).tokens[0]))
    depth = simulator.constraints.max_in_flight
    handles = []

    def collect():
        for text, token in zip(texts, backend.collect(handles.pop(0)).tokens, strict=False):
            text.append(int(token))

    for _ in range(6):
        handles.append(backend.submit(simulator.make([(stream, [-1 - stream.slot]) for stream in streams])))
        if len(handles) == depth:
            collect()
    while handles:
        collect()
    for text, prompt in zip(texts, (20, 41, 5), strict=True):
        logits = expected_logits(loaded, text)
        for at in range(prompt, len(text)):
            short = logits[at - 1].max() - logits[at - 1][text[at]]
            allowed = 2 * UNITS[loaded.dtype] * EPSILON[loaded.dtype] * np.abs(logits[at - 1]).max()
            assert short <= allowed, f"token {at} is not the likeliest"


def test_logprobs_of_a_step(loaded, rng):
    loaded.reset_cache()
    simulator = Simulator(loaded)
    text = rng.integers(0, loaded.model.vocab_size, 30).tolist()
    output = simulator.run([(simulator.open(), text)], SamplerShape(logprobs=3))
    logits = expected_logits(loaded, text)[-1]
    expected = reference.log_softmax(logits)
    dtype = "float32" if loaded.dtype == "float64" else loaded.dtype  # of the output
    units, largest = 2 * UNITS[dtype], float(np.abs(logits).max())
    assert_close(output.logprobs, expected[output.tokens], dtype, units, magnitude=largest)
    assert_close(output.top_logprobs[0], expected[output.top_ids[0]], dtype, units, magnitude=largest)
    assert output.tokens[0] == output.top_ids[0, 0]


def test_sequences_move_between_blocks(loaded, rng):
    """Swapped out and in elsewhere, and copied: the next logits are the same."""
    backend = loaded.backend
    backend.init_cache(LIMITS, NUM_BLOCKS, num_host_blocks=8)
    simulator = Simulator(loaded)
    text = rng.integers(0, loaded.model.vocab_size, 40).tolist()
    stream = simulator.open()
    simulator.run([(stream, text[:-1])])
    moved = np.asarray(simulator._pool.take(len(stream.blocks)), np.int32)
    blocks = np.asarray(stream.blocks, np.int32)
    if backend.capabilities().swap:
        backend.swap_out(blocks, np.arange(len(blocks), dtype=np.int32))
        backend.swap_in(np.arange(len(blocks), dtype=np.int32), moved)
    else:
        backend.copy_blocks(blocks, moved)
    stream.blocks = moved.tolist()
    logits = simulator.logits([(stream, text[-1:])])
    assert_close(logits[0], expected_logits(loaded, text)[-1], loaded.dtype, UNITS[loaded.dtype])
