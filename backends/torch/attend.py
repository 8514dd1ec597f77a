"""Attention of queries to one set of keys, with the log of the softmax's denominator, so that sets can be merged.

Shapes: q [A, B, n, D]; k and v [A, B, m, D], or [A, 1, m, D] where all of B share them; both give the output
[A, B, n, D] and, if asked, the log-sum-exp [A, B, n] in float32 or wider. `mask` is added to the scores.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def has_flash(device: torch.device) -> bool:
    """Whether torch has the fused kernel that `flash` calls: an internal one, so it may be gone some day."""
    return device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """torch's fused kernel for CPUs: sums in float32, and no array of scores. The mask has q's dtype."""
    shape = (*q.shape[:2], *k.shape[2:])
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.expand(shape), v.expand(shape), 0.0, causal, attn_mask=mask, scale=scale
    )


def composed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, need_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of matrix products; faster for few queries in float32. The log-sum-exp is [0] unless asked for."""
    folded = q if k.shape[1] == q.shape[1] else q.flatten(1, 2).unsqueeze(1)
    scores = torch.matmul(folded * scale, k.transpose(-1, -2)).view(*q.shape[:3], k.shape[2])
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if mask is not None:
        scores += mask
    lse = scores.new_empty(0)
    if need_lse:
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.to(v.dtype).view(*folded.shape[:3], k.shape[2]), v)
    return out.view(q.shape), lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the union of two sets of keys, from the attention to each. The output is as wide as lse."""
    total = torch.logaddexp(lse, other_lse)
    out = out * torch.exp(lse - total).unsqueeze(-1) + other * torch.exp(other_lse - total).unsqueeze(-1)
    return out, total
