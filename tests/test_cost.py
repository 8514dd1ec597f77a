"""The least cost of a step, against counts by hand."""

from __future__ import annotations

from octavo.core.models.cost import step_cost
from octavo.core.models.spec import weight_bytes
from octavo.testing.models import tiny_spec

LLAMA_8B = tiny_spec(
    vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336,
)  # fmt: skip


def test_a_token_takes_two_operations_a_weight_and_all_weights_once() -> None:
    """8.03e9 parameters, of which the embedding's 0.53e9 are looked up and not multiplied."""
    cost = step_cost(LLAMA_8B, tokens=1, pairs=0, context=0, rows=1, weight_bytes=2, kv_bytes=2)
    assert abs(cost.flops / (2 * 7.50e9) - 1) < 0.01
    read = weight_bytes(LLAMA_8B, "bfloat16") - 2 * 128256 * 4096
    assert abs(cost.bytes / read - 1) < 0.001


def test_attention_reads_each_key_once() -> None:
    alone = step_cost(LLAMA_8B, 64, 0, 0, 64, 2, 2)
    full = step_cost(LLAMA_8B, 64, 64 * 8192, 64 * 8192, 64, 2, 2)
    assert full.flops - alone.flops == 64 * 8192 * 32 * 4 * 32 * 128
    assert full.bytes - alone.bytes == 64 * 8192 * 131072  # 128 KiB of keys and values a token


def test_a_chunk_reads_its_context_once_for_all_its_queries() -> None:
    chunk = step_cost(LLAMA_8B, 256, 256 * 1000, 1000, 1, 2, 2)
    twice = step_cost(LLAMA_8B, 512, 512 * 1000, 1000, 1, 2, 2)
    written = 256 * (131072 + 2 * 4096)
    assert twice.bytes - chunk.bytes == written
    assert twice.flops - 2 * chunk.flops == -2 * 128256 * 4096
