"""The demo model on the TPU plugin, its programs run by JAX's CPU: greedy output equals Transformers'."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams

from .conftest import Reference

pytestmark = pytest.mark.demo
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_greedy_tokens_equal_transformers(reference: Reference) -> None:
    """Prompts of 2 to 300 tokens, in chunks of at most 128, alone and preempted; then from the prefix cache."""
    pytest.importorskip("jax")
    prompts = [reference.prompts[i] for i in (1, 7, 10, 12)]
    block_bytes = 2 * 30 * 3 * 64 * 4 * 16
    with LLM(
        device="tpu",
        backend_option={"platform": "cpu"},
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        kv_cache_memory=30 * block_bytes,
    ) as llm:
        first = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for prompt, output in zip(prompts, first, strict=True):
            assert len(output) == 16
            reference.check_greedy(prompt, output)
        before = llm.stats().prefix_hits
        assert [list(o.outputs[0].token_ids) for o in llm.generate(prompts[2:], GREEDY, use_tqdm=False)] == first[2:]
        assert llm.stats().prefix_hits > before
