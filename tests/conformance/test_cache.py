"""What lands in the KV cache, and moving blocks about: bit for bit."""

import numpy as np
import pytest

from octavo.core.backend import StepLimits
from octavo.testing.models import tiny_spec

NUM_BLOCKS = 7


@pytest.fixture(scope="module", params=[16, 32])
def loaded(kit, request):
    if request.param not in kit.create().capabilities().block_sizes:
        pytest.skip("the device does not take this block size")
    limits = StepLimits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64, block_size=request.param)
    loaded = kit.load(tiny_spec(), limits, NUM_BLOCKS, num_host_blocks=4)
    return loaded


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def everything(loaded):
    return loaded.backend.export_blocks(np.arange(NUM_BLOCKS, dtype=np.int32)).copy()


def fill(loaded, rng):
    """Random numbers in every slot of every layer; returns them as [layers, 2, slots, K, D]."""
    m, slots = loaded.local, NUM_BLOCKS * loaded.limits.block_size
    values = rng.standard_normal((m.num_layers, 2, slots, m.num_kv_heads, m.head_dim))
    for layer in range(m.num_layers):
        loaded.write(np.arange(slots), *values[layer], layer=layer)
    return values


def test_write_changes_the_slots_and_nothing_else(loaded, rng):
    values = fill(loaded, rng)
    size = loaded.limits.block_size
    slots = rng.permutation(np.arange(size, NUM_BLOCKS * size))[: size + 3]
    new = rng.standard_normal((2, len(slots), *values.shape[3:]))
    # Padded tokens go to the null block, all of them to the same slot if need be.
    padded = np.concatenate([new, new[:, :5]], axis=1)
    loaded.write(np.concatenate([slots, np.zeros(5, int)]), *padded)
    after = everything(loaded)
    values[0][:, slots] = new
    for layer in range(loaded.model.num_layers):
        loaded.write(np.arange(NUM_BLOCKS * size), *values[layer], layer=layer)
    assert (after[1:] == everything(loaded)[1:]).all()


def test_blocks_are_different_where_their_contents_are(loaded, rng):
    """Otherwise the tests here would show nothing."""
    fill(loaded, rng)
    contents = everything(loaded)
    assert len(np.unique(contents, axis=0)) == NUM_BLOCKS


def test_export_and_import(loaded, rng):
    fill(loaded, rng)
    before = everything(loaded)
    loaded.backend.import_blocks(np.asarray([5, 2], np.int32), before[[1, 3]])
    expected = before.copy()
    expected[[5, 2]] = before[[1, 3]]
    assert (everything(loaded) == expected).all()


def test_copy_blocks(loaded, rng):
    fill(loaded, rng)
    before = everything(loaded)
    loaded.backend.copy_blocks(np.asarray([1, 1, 6], np.int32), np.asarray([4, 2, 3], np.int32))
    expected = before.copy()
    expected[[4, 2, 3]] = before[[1, 1, 6]]
    assert (everything(loaded) == expected).all()


def test_swap(loaded, rng):
    if not loaded.backend.capabilities().swap:
        pytest.skip("the device declares no swap")
    fill(loaded, rng)
    before = everything(loaded)
    loaded.backend.swap_out(np.asarray([6, 1, 3], np.int32), np.asarray([0, 3, 1], np.int32))
    fill(loaded, rng)
    now = everything(loaded)
    loaded.backend.swap_in(np.asarray([3, 1], np.int32), np.asarray([2, 5], np.int32))
    now[[2, 5]] = before[[1, 3]]
    assert (everything(loaded) == now).all()


def test_a_new_cache_is_zero(loaded, rng):
    fill(loaded, rng)
    loaded.backend.init_cache(loaded.limits, NUM_BLOCKS, 4)
    assert not everything(loaded).any()


def test_block_bytes_are_what_is_exported(loaded):
    """The plan's bytes per block are at least what a block holds, and at most twice that (padding)."""
    held = everything(loaded).shape[1]
    planned = loaded.backend.memory(loaded.model, loaded.limits).block_bytes
    assert held <= planned <= 2 * held
