"""The attention kernel: numbers in Pallas' TPU interpreter against float64, and real compiles for four chips."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from test_tpu_compile import ENV, needs_libtpu

import octavo
from octavo.core.step import StepShape
from octavo.testing import reference
from octavo.testing.batches import Part, Pool, Stream, build_step
from octavo.testing.numbers import assert_close, rounded

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from octavo.backends.tpu import kernel  # noqa: E402

SCRIPT = Path(octavo.__file__).parent / "ci/tpu_kernel_compile.py"
LAYERS, BLOCKS, SLOTS = 2, 96, 32
SMALL = kernel.Sizes(queries=16, keys=32, buffers=3)  # so that small cases have many blocks and pieces
# As the conformance suite has it: 16-bit devices round scores and weights once each.
UNITS = {"float32": 16, "bfloat16": 2}

# (tokens in the cache, tokens of this step) of each sequence
DECODES = [(5, 1), (130, 1), (15, 1), (16, 1), (64, 1), (0, 1), (31, 1)]
MIXED = [(50, 1), (0, 20), (33, 18), (7, 1), (128, 1)]
BATCHES = {
    "one token": [(0, 1)],
    "decodes": DECODES,
    "decodes of two blocks": [(7 * i, 1) for i in range(18)],
    "prompt": [(0, 40)],
    "prompts": [(0, 17), (0, 1), (0, 33), (0, 16)],
    "chunk": [(35, 20)],
    "chunks": [(16, 16), (1, 30), (100, 7)],
    "decodes, then chunks": MIXED,
}


class Case:
    """A batch over a cache with NaN and infinities wherever there is no token; q, keys and values are random.

    Attributes:
        histories: keys and values of each sequence: float64 [2, m, K, D].
    """

    def __init__(self, batch, heads, kv_heads, head_dim, block_size, window, dtype, cache_dtype, padding, seed):
        rng = np.random.default_rng(seed)
        self.dtype, self.window, self.kv_heads, self.scale = dtype, window, kv_heads, head_dim**-0.5
        pool, parts, self.histories = Pool(BLOCKS, seed), [], []
        slots = BLOCKS * block_size
        cache = rng.choice([np.nan, np.inf, -np.inf], (slots, kv_heads, 2, head_dim))
        for slot, (context, new) in enumerate(batch):
            stream = Stream(slot, context)
            stream.reserve(context + new, block_size, pool)
            parts.append(Part(stream, [0] * new))
            # A cache of another dtype is converted to that of the queries.
            pairs = rounded(rng.standard_normal((context + new, kv_heads, 2, head_dim)), cache_dtype)
            cache[stream.slots(0, context + new, block_size)] = pairs
            self.histories.append(np.moveaxis(rounded(pairs, dtype), 2, 0))
        longest = max(len(part.sequence.blocks) for part in parts)
        tokens, count = sum(new for _, new in batch) + padding, len(batch) + padding
        decode = all(new == 1 for _, new in batch)
        shape = StepShape(tokens, count, longest + (padding > 0), count, decode)
        self.inputs = build_step(parts, shape, block_size, SLOTS + padding).inputs
        for s, (context, _) in enumerate(batch if window else []):  # as the engine leaves them behind a window
            self.inputs.block_tables[s, : max(context - window + 1, 0) // block_size] = 0
        self.q = rounded(rng.standard_normal((tokens, heads, head_dim)), dtype)
        stack = np.full((LAYERS, BLOCKS, block_size, kv_heads * 2 * head_dim), np.nan)
        stack[1] = cache.reshape(BLOCKS, block_size, -1)
        self.stack = jnp.asarray(stack, cache_dtype)

    def run(self, cut=SMALL, layer=1, **interpret):
        """float64 [T, H, D]."""
        i = self.inputs
        attention = jitted(self.scale, self.window, self.kv_heads, cut, pltpu.InterpretParams(**interpret))
        q = jnp.asarray(self.q, self.dtype)
        return np.asarray(attention(q, self.stack, layer, i.query_start, i.seq_lens, i.block_tables), np.float64)

    def check(self, out, skip=()):
        """The result against the reference, but for some sequences."""
        start = self.inputs.query_start
        for s, (keys, values) in enumerate(self.histories):
            if s not in skip:
                rows = slice(start[s], start[s + 1])
                expected = reference.attention(self.q[rows], keys, values, self.window, self.scale)
                assert_close(out[rows], expected, self.dtype, UNITS[self.dtype], f"sequence {s}")
        assert (out[start[-1] :] == 0).all()


@lru_cache
def jitted(scale, window, kv_heads, cut, interpret):
    def attention(q, stack, layer, query_start, seq_lens, tables):
        return kernel.ragged_attention(
            q, stack, layer, query_start, seq_lens, tables,
            scale=scale, window=window, kv_heads=kv_heads, cut=cut, interpret=interpret,
        )  # fmt: skip

    return jax.jit(attention)


def case(
    batch, heads=4, kv_heads=2, head_dim=64, block_size=16, window=None, dtype="float32", cache=None, padding=0, seed=0
):
    return Case(batch, heads, kv_heads, head_dim, block_size, window, dtype, cache or dtype, padding, seed)


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    c = case(BATCHES[name])
    c.check(c.run())


@pytest.mark.parametrize("window", [1, 20, 32, 100])
def test_windows_over_blocks_that_were_freed(window):
    c = case(MIXED, window=window)
    c.check(c.run())


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (3, 3), (4, 1), (8, 1), (9, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_heads(heads, kv_heads, dtype):
    c = case(MIXED, heads, kv_heads, dtype=dtype)
    c.check(c.run())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_heads_and_blocks(head_dim, block_size):
    c = case(MIXED, head_dim=head_dim, block_size=block_size, dtype="bfloat16")
    c.check(c.run())


@pytest.mark.parametrize(("dtype", "cache"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_cache_of_another_dtype(dtype, cache):
    c = case(MIXED, head_dim=128, dtype=dtype, cache=cache)
    c.check(c.run())


@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_padded_tokens_and_sequences(batch):
    c = case(batch, padding=19, dtype="bfloat16")
    c.check(c.run())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (3, 1, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sizes_that_are_chosen(heads, kv_heads, head_dim, dtype):
    c = case([*DECODES, (300, 1), (0, 130)], heads, kv_heads, head_dim, dtype=dtype)
    c.check(c.run(cut=None))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed):
    rng = np.random.default_rng(seed)
    batch = [(int(rng.integers(100)), int(rng.choice([1, 1, rng.integers(1, 50)]))) for _ in range(rng.integers(1, 8))]
    window = None if seed % 2 else int(rng.integers(1, 60))
    c = case(batch, 3, 1, window=window, padding=int(rng.integers(5)), seed=seed)
    c.check(c.run(kernel.Sizes(16, int(rng.choice([16, 32, 64])), int(rng.integers(2, 5)))))


def test_copies_and_arithmetic_do_not_race():
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")  # no public way yet
    c = case(MIXED)
    c.check(c.run(dma_execution_mode="eager", detect_races=True))
    assert not interpreter.races.races_found


def test_a_sequence_with_nan_spoils_no_other():
    c = case([(5, 1), (40, 1), (33, 10), (7, 1)])
    table, seq_len = c.inputs.block_tables, c.inputs.seq_lens
    for s in (1, 2):
        c.stack = c.stack.at[1, table[s, 0], : min(seq_len[s], 16)].set(np.nan)
    out = c.run()
    c.check(out, skip=(1, 2))
    assert np.isnan(out[1]).all()


def test_a_layer_of_a_loop():
    c = case(MIXED)
    stack = c.stack.at[0].set(jnp.where(jnp.isfinite(c.stack[1]), c.stack[1] * 0.5, c.stack[1]))
    i = c.inputs

    @jax.jit
    def both(q, stack):
        attention = jitted(c.scale, c.window, c.kv_heads, SMALL, pltpu.InterpretParams())

        def one(carry, layer):
            return carry, attention(q, stack, layer, i.query_start, i.seq_lens, i.block_tables)

        return jax.lax.scan(one, 0, jnp.arange(LAYERS))[1]

    out = np.asarray(both(jnp.asarray(c.q, c.dtype), stack), np.float64)
    c.check(out[1])
    c.histories = [history * 0.5 for history in c.histories]
    c.check(out[0])


def test_items_are_made_once_for_all_layers():
    c = case(MIXED, padding=40)
    i = c.inputs
    start, block, sequence = map(np.asarray, kernel.plan(jnp.asarray(i.query_start), len(c.q), 16))
    items = [(b, s) for b in range(len(start) - 1) for s in sequence[start[b] : start[b + 1]]]
    expected = []
    for b in range(-(-len(c.q) // 16)):
        for s in range(len(i.seq_lens)):
            if max(i.query_start[s], 16 * b) < min(i.query_start[s + 1], 16 * b + 16):
                expected.append((b, s))
    assert items == expected
    assert [b for b, _ in items] == block[: len(items)].tolist()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"q": (4, 2, 80)}, "head_dim 80"),
        ({"dtype": "float16"}, "float16"),
        ({"stack": (1, 4, 24, 128)}, "block_size 24"),
        ({"stack": (1, 4, 8, 128), "dtype": "bfloat16"}, "block_size 8"),
        ({"scale": 0.0}, "scale 0.0"),
    ],
)
def test_what_it_cannot_do_is_refused(change, what):
    dtype = change.get("dtype", "float32")
    q, stack = jnp.zeros(change.get("q", (4, 2, 64)), dtype), jnp.zeros(change.get("stack", (1, 4, 16, 128)), dtype)
    start, lens, tables = jnp.arange(5), jnp.ones(4, jnp.int32), jnp.ones((4, 1), jnp.int32)
    with pytest.raises(ValueError, match=what):
        kernel.ragged_attention(
            q, stack, 0, start, lens, tables, scale=change.get("scale", 1.0), window=None, kv_heads=1
        )


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_it_compiles(chip, tmp_path):
    needs_libtpu()
    path = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--topology", chip, "--json", str(path)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["kernels"]
    for name, entry in report["kernels"].items():
        assert entry["flops"] >= entry["least_flops"], name  # the estimate reaches XLA's analysis
    assert report["tables"] == {"within the budget": True, "beyond the memory": False}
    assert report["loop"]["aliased_bytes"] == report["loop"]["cache_bytes"]
    assert report["loop"]["temp_bytes"] < report["loop"]["cache_bytes"] // 4
