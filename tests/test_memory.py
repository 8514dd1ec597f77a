"""The number of KV blocks from a memory plan, and the advice in the errors."""

from __future__ import annotations

import re

import pytest

from octavo.core.backend import MemoryPlan, StepLimits
from octavo.core.config import EngineConfig
from octavo.core.engine.memory import count_blocks, fit_model_len, size_text
from octavo.core.errors import ConfigError, OutOfMemoryError

GIB = 1 << 30
LIMITS = StepLimits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512, block_size=16)


def plan(**changes):
    fields = {"total": 10 * GIB, "available": 9 * GIB, "weights": GIB, "activations": GIB, "block_bytes": 1 << 20}
    return MemoryPlan(**fields | changes)


def test_utilization_counts_weights_and_activations():
    assert count_blocks(plan(), LIMITS, EngineConfig(memory_utilization=0.3)) == 1024
    assert count_blocks(plan(), LIMITS, EngineConfig(kv_cache_memory=100 << 20)) == 100


def test_no_more_blocks_than_all_sequences_can_use():
    assert count_blocks(plan(), LIMITS, EngineConfig(memory_utilization=0.9)) == 8 * 256 + 1


def test_the_default_is_bounded_by_the_cache_share_but_holds_one_sequence():
    assert count_blocks(plan(default_cache_share=0.05), LIMITS, EngineConfig()) == 512
    assert count_blocks(plan(default_cache_share=0.001), LIMITS, EngineConfig()) == 257


def test_a_model_too_large_says_so():
    with pytest.raises(OutOfMemoryError, match=r"does not fit: weights take 20.0 GiB .* 9.0 GiB of 10.0 GiB are free"):
        count_blocks(plan(weights=20 * GIB), LIMITS, EngineConfig())


def test_the_advice_for_kv_cache_memory_works():
    with pytest.raises(OutOfMemoryError) as caught:
        count_blocks(plan(), LIMITS, EngineConfig(kv_cache_memory=8 * GIB))
    assert "At most 7.0 GiB would" in str(caught.value)
    assert count_blocks(plan(), LIMITS, EngineConfig(kv_cache_memory=7 * GIB)) > 1


def test_the_advice_for_utilization_works():
    with pytest.raises(OutOfMemoryError, match="Raise --memory-utilization"):
        count_blocks(plan(), LIMITS, EngineConfig(memory_utilization=0.1))
    with pytest.raises(OutOfMemoryError, match="Two are the least"):
        count_blocks(plan(), LIMITS, EngineConfig(kv_cache_memory=1 << 20))


def test_a_share_that_is_not_free_is_refused_rather_than_cut():
    with pytest.raises(OutOfMemoryError) as caught:
        count_blocks(plan(), LIMITS, EngineConfig(memory_utilization=0.95))
    advised = float(re.search(r"At most (\S+) would fit", str(caught.value)).group(1))
    assert advised == 0.9
    assert count_blocks(plan(), LIMITS, EngineConfig(memory_utilization=advised)) > 1


def test_the_advice_for_the_context_length_works():
    blocks = 101
    with pytest.raises(OutOfMemoryError) as caught:
        fit_model_len(blocks, LIMITS, plan(), asked=4096)
    advised = int(re.search(r"Lower it to (\d+)", str(caught.value)).group(1))
    shorter = StepLimits(advised, 8, 512, 16)
    assert fit_model_len(blocks, shorter, plan(), asked=advised) == advised == 1600
    assert fit_model_len(blocks, LIMITS, plan(), asked=None) == 1600


def test_both_ways_to_size_the_cache_contradict():
    with pytest.raises(ConfigError, match="not both"):
        EngineConfig(memory_utilization=0.5, kv_cache_memory=GIB)


def test_sizes_are_readable():
    assert [size_text(n) for n in (5, 2048, 3 << 20, 5 << 40)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "5120.0 GiB"]
