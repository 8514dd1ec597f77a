"""The demo model on the TPU plugin, its programs run by JAX's CPU: greedy output equals Transformers'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams

from .conftest import Reference

pytestmark = pytest.mark.demo
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    pytest.importorskip("jax")
    with LLM(
        device="tpu",
        backend_option={"platform": "cpu"},
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
        kv_cache_memory=64 << 20,
    ) as llm:
        yield llm


def test_greedy_tokens_equal_transformers(llm: LLM, reference: Reference) -> None:
    """Prompts of 2 to 300 tokens in chunks of at most 64; then from the prefix cache."""
    prompts = [reference.prompts[i] for i in (1, 7, 10, 12)]
    first = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for prompt, output in zip(prompts, first, strict=True):
        assert len(output) == 16
        reference.check_greedy(prompt, output)
    before = llm.stats().prefix_hits
    for prompt, output in zip(prompts[1:], first[1:], strict=True):
        assert list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == output
    assert llm.stats().prefix_hits > before


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_parallel_changes_nothing(devices: int, reference: Reference) -> None:
    """9 query and 3 key/value heads, padded to 12 and 4; chunks, the prefix cache, and preemption by swap."""
    pytest.importorskip("jax")
    prompts = [reference.prompts[i] for i in (2, 7, 8)]
    params = GREEDY.replaced(max_tokens=40)
    block_bytes = 2 * 30 * 4 * 64 * 4 * 16
    with LLM(
        device="tpu:cpu",
        backend_option={"tensor_parallel": str(devices), "cpu_devices": "4"},
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=128,
        kv_cache_memory=11 * block_bytes,
        swap_space=64 << 20,
    ) as llm:
        first = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        for prompt, output in zip(prompts, first, strict=True):
            assert len(output) == 40
            reference.check_greedy(prompt, output)
        again = llm.generate(prompts[-1:], params, use_tqdm=False)
        assert list(again[0].outputs[0].token_ids) == first[-1]
        assert llm.stats().preemptions > 0
        assert llm.stats().prefix_hits > 0


def test_nothing_compiles_once_the_engine_is_ready(llm: LLM, reference: Reference) -> None:
    """All kinds of sampling, lengths and numbers of requests, with copies on write; counted where JAX compiles."""
    import jax

    compiled: list[str] = []

    def count(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    some = [reference.prompts[i] for i in (0, 2, 4, 6, 8, 9, 11)]
    drawn = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=7, seed=3, ignore_eos=True)
    params = [
        GREEDY,
        drawn,
        drawn.replaced(n=3, top_k=20),
        GREEDY.replaced(logprobs=3, prompt_logprobs=1),
        drawn.replaced(presence_penalty=0.5, repetition_penalty=1.2, min_p=0.05),
        GREEDY.replaced(logit_bias={5: 2.0}),
        GREEDY,
    ]
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for take in (1, 3, 7):
            llm.generate(some[:take], params[:take], use_tqdm=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiled
