"""What a step costs at least: arithmetic and memory traffic as functions of shapes, to hold measurements against."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ModelSpec, layer_params


@dataclass(frozen=True)
class StepCost:
    """Of one step.

    Attributes:
        flops: floating-point operations, a multiply-add counted as two.
        bytes: bytes that have to be read from or written to the device's memory once.
    """

    flops: int
    bytes: int


def step_cost(
    model: ModelSpec, tokens: int, pairs: int, context: int, rows: int, weight_bytes: int, kv_bytes: int
) -> StepCost:
    """The least that a step takes: matrix products and attention; every weight read once, every key read once.

    Norms, rotations, activations and sampling are left out: their arithmetic is small, and what passes from one
    operation to the next need not leave the chip.

    Args:
        tokens: T.
        pairs: of queries and the keys that they see, over all tokens.
        context: tokens in the cache that some query sees, over all sequences, this step's included.
        rows: R, of logits.
        weight_bytes: of one weight.
        kv_bytes: of one number in the cache.
    """
    linear = sum(p.size for p in layer_params(model, 0) if p.kind == "linear")
    other = sum(p.size for p in layer_params(model, 0) if p.kind != "linear")
    head = model.vocab_size * model.hidden_size
    flops = 2 * tokens * linear + 4 * pairs * model.num_heads * model.head_dim
    token = 2 * model.num_kv_heads * model.head_dim * kv_bytes
    layer = (linear + other) * weight_bytes + (context + tokens) * token
    ends = (tokens * model.hidden_size + (head if rows else 0)) * weight_bytes + 4 * rows * model.vocab_size
    return StepCost(model.num_layers * flops + 2 * rows * head, model.num_layers * layer + ends)
