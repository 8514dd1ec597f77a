"""Greedy output of the demo model on the CPU equals Transformers', however the engine arrives at it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from octavo import LLM, SamplingParams

from .conftest import NEW_TOKENS, Reference

pytestmark = pytest.mark.demo
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
KV_BYTES = 512 << 20


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", kv_cache_memory=KV_BYTES) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM, reference: Reference) -> list[list[int]]:
    """The outputs of all prompts in one batch, each checked against Transformers."""
    outputs = tokens_of(llm, reference.prompts)
    assert [len(out) for out in outputs] == [NEW_TOKENS] * len(reference.prompts)
    for prompt, output in zip(reference.prompts, outputs, strict=True):
        reference.check_greedy(prompt, output)
    return outputs


def test_greedy_tokens_equal_transformers(expected: list[list[int]]) -> None:
    assert len(expected) >= 16


def test_a_prefix_cache_hit_changes_nothing(llm: LLM, reference: Reference, expected: list[list[int]]) -> None:
    before = llm.stats().prefix_hits
    assert tokens_of(llm, reference.prompts[8:]) == expected[8:]
    assert llm.stats().prefix_hits - before >= sum(len(p) - 16 for p in reference.prompts[8:]) - 160


@pytest.mark.parametrize("budget", [48, 333])
def test_chunked_prefill_changes_nothing(budget: int, reference: Reference, expected: list[list[int]]) -> None:
    some = [0, 3, 5, 9, 12, 14]
    with LLM(
        device="cpu", dtype="float32", kv_cache_memory=KV_BYTES, max_num_batched_tokens=budget, max_num_seqs=16
    ) as llm:
        assert tokens_of(llm, [reference.prompts[i] for i in some]) == [expected[i] for i in some]


@pytest.mark.parametrize("swap", [0, 256 << 20])
def test_preemption_changes_nothing(swap: int, reference: Reference, expected: list[list[int]]) -> None:
    some = [4, 6, 8, 9, 10, 11]
    block_bytes = 2 * 30 * 3 * 64 * 4 * 16
    with LLM(
        device="cpu", dtype="float32", kv_cache_memory=40 * block_bytes, swap_space=swap, max_model_len=512
    ) as llm:
        assert tokens_of(llm, [reference.prompts[i] for i in some]) == [expected[i] for i in some]
        assert llm.stats().preemptions > 0


def test_company_in_the_batch_changes_nothing(llm: LLM, reference: Reference, expected: list[list[int]]) -> None:
    for i in (2, 9):
        assert tokens_of(llm, [reference.prompts[i]]) == [expected[i]]
    noise = [p[::-1] for p in reference.prompts[:9]]
    mixed = [reference.prompts[i] for i in (1, 5, 8)]
    params = [SamplingParams(temperature=1.0, max_tokens=20 + 3 * i) for i in range(9)] + [GREEDY] * 3
    outputs = llm.generate(noise + mixed, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs[9:]] == [expected[i] for i in (1, 5, 8)]


def test_logits_agree_with_transformers(llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = llm._engine.backend.ops
    seen: list[np.ndarray] = []
    original = ops.logits

    def record(x, weight):
        logits = original(x, weight)
        seen.append(logits.numpy().copy())
        return logits

    monkeypatch.setattr(ops, "logits", record)
    for i in (3, 10, 13):
        seen.clear()
        prompt = reference.prompts[i][::-1]  # nothing of it is in the prefix cache
        output = tokens_of(llm, [prompt], GREEDY.replaced(max_tokens=8))[0]
        ours = np.concatenate([rows[:1] for rows in seen])
        theirs = reference.logits(prompt + output)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)


def test_a_seeded_request_does_not_depend_on_company(llm: LLM, reference: Reference) -> None:
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=1234, max_tokens=24, ignore_eos=True)
    prompt = reference.prompts[7]
    alone = tokens_of(llm, [prompt], seeded)[0]
    outputs = llm.generate([*reference.prompts[:9], prompt], [GREEDY] * 9 + [seeded], use_tqdm=False)
    assert list(outputs[-1].outputs[0].token_ids) == alone


def test_logprobs_agree_with_transformers(llm: LLM, reference: Reference) -> None:
    prompt = reference.prompts[6][::-1]
    params = GREEDY.replaced(max_tokens=5, logprobs=4, prompt_logprobs=2)
    out = llm.generate([prompt], params, use_tqdm=False)[0]
    logits = reference.logits(prompt + list(out.outputs[0].token_ids)).astype(np.float64)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    for i, entry in enumerate(out.outputs[0].logprobs):
        row = logprobs[len(prompt) - 1 + i]
        assert entry.top_ids == np.argsort(-row)[:4].tolist()
        np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:4], atol=1e-3)
        assert entry.rank == 1
    for i, entry in enumerate(out.prompt_logprobs):
        row = logprobs[i]
        assert entry.token == prompt[i + 1]
        np.testing.assert_allclose(entry.logprob, row[prompt[i + 1]], atol=1e-3)
        assert abs(entry.rank - 1 - (row > row[prompt[i + 1]]).sum()) <= 1


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_generate(reference: Reference, expected: list[list[int]]) -> None:
    """The same once more against `generate`, token after token, with Transformers' own KV cache."""
    import torch

    for prompt, want in zip(reference.prompts, expected, strict=True):
        out = reference.model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert out[0, len(prompt) :].tolist() == want
