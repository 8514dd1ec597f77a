"""The demo model on the TPU plugin's CPU mode, through the server: the official client, preemption, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from octavo.core.hub import ModelFiles

from .conftest import Reference
from .serving import Server

pytestmark = pytest.mark.demo
BLOCK_BYTES = 2 * 30 * 3 * 64 * 4 * 16
LENGTH = 128


@pytest.fixture(scope="module", params=["0", "64MiB"], ids=["recompute", "swap"])
def server(request: pytest.FixtureRequest, demo_model: ModelFiles) -> Iterator[Server]:
    """Ten blocks of 16 tokens, and prompts in chunks of at most 32."""
    pytest.importorskip("jax")
    server = Server(
        *("--device", "tpu", "--backend-option", "platform=cpu", "--dtype", "float32", "--swap-space", request.param),
        *("--max-model-len", str(LENGTH), "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
        *("--kv-cache-memory", str(11 * BLOCK_BYTES)),
    )
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: list[int], tokens: int) -> list[int]:
    """Greedy, streamed."""
    stream = client.completions.create(
        model="SmolLM2-135M-Instruct",
        prompt=prompt,
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return [token for chunk in stream if chunk.choices for token in chunk.choices[0].token_ids or ()]


def test_greedy_tokens_equal_transformers(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    """Two sequences of up to 104 tokens in ten blocks: one has to wait. Then from the prefix cache."""
    prompts = [reference.prompts[i] for i in (2, 7, 8)]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda prompt: complete(client, prompt, 40), prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 40
        reference.check_greedy(prompt, output)
    assert server.metric("num_preemptions_total") > 0
    hits = server.metric("prefix_cache_hits_total")
    assert complete(client, prompts[2], 8) == outputs[2][:8]
    assert server.metric("prefix_cache_hits_total") > hits
    server.wait_idle()
    assert server.metric("late_compiles_total") == 0


def test_what_is_longer_than_the_largest_program_is_refused(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(LENGTH)):
        complete(client, [1] * (LENGTH + 1), 1)
    assert len(complete(client, [1, 2, 3], 2)) == 2
    server.wait_idle()
    assert server.metric("late_compiles_total") == 0
