"""The sampler's expensive ops on torch: the same results as core's, with the few passes that eager code can afford."""

from __future__ import annotations

import math

import array_api_compat.torch as xp
import numpy as np
import torch

from ...core.sampling import rng

Tensor = torch.Tensor

_HEAD = 256
"""Likeliest tokens that are looked at first; rows whose filters need more are sorted whole."""

_ROWS = 4
"""Rows of noise that are made at once: few enough for the processor's cache."""


def threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`core.sampling.filters.threshold`: float32 [R, V] and three [R] → [R, 1]; without the bisection."""
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    largest = logits.amax(dim=-1, keepdim=True)
    peak = torch.where(torch.isfinite(largest), largest, 0.0)
    lowest = torch.finfo(logits.dtype).min
    least = torch.where(min_p > 0, peak + torch.log(torch.where(min_p > 0, min_p, 1.0)), lowest)
    rows = torch.nonzero(((top_k > 0) | (top_p < 1))[:, 0])[:, 0]
    if rows.numel():
        by_order = _by_order(logits[rows], peak[rows], top_k[rows], top_p[rows])
        least[rows] = torch.maximum(least[rows], by_order)
    return torch.where(logits >= least, logits, largest).amin(dim=-1, keepdim=True)


def _by_order(logits: Tensor, peak: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that top-k and top-p keep, [R, 1]: from each row's head, or from all where that is too short."""
    vocab_size = logits.shape[-1]
    total = torch.exp(logits - peak).sum(dim=-1, keepdim=True)
    head = torch.topk(logits, min(_HEAD, vocab_size), dim=-1).values
    least, enough = _in_sorted(head, head.shape[-1] == vocab_size, total, peak, top_k, top_p)
    rows = torch.nonzero(~enough[:, 0])[:, 0]
    if rows.numel():
        least[rows], _ = _in_sorted(_sorted(logits[rows]), True, total[rows], peak[rows], top_k[rows], top_p[rows])
    return least


def _in_sorted(
    values: Tensor, whole: bool, total: Tensor, peak: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(what is kept at least [R, 1], whether the values were enough to tell [R, 1]).

    Args:
        values: [R, n]; the largest logits, descending; all of them if `whole`.
        total: [R, 1]; the sum of exp(logit - peak) over the row.
    """
    n = values.shape[-1]
    lowest = torch.finfo(values.dtype).min
    at = (top_k - 1).clamp(0, n - 1).long()
    kth = values.gather(-1, at)
    # With k above the number of finite logits nothing is cut.
    kth = torch.where((top_k > 0) & (top_k <= n) & (kth > -math.inf), kth, lowest)
    mass = torch.exp(values - peak).cumsum(dim=-1)
    # All values that tie with the k-th are kept. They may go on beyond the head; then the head is not enough.
    kept = (values >= kth).sum(dim=-1, keepdim=True).clamp(min=1)
    wanted = top_p * torch.where(kth > lowest, mass.gather(-1, kept - 1), total)
    reached = mass >= wanted
    # Where rounding lets the sum of all miss its own total, all are kept.
    first = torch.where(reached.any(-1, keepdim=True), reached.to(torch.int8).argmax(dim=-1, keepdim=True), n - 1)
    by_mass = torch.where(top_p < 1, values.gather(-1, first).clamp(min=lowest), lowest)
    least = torch.maximum(kth, by_mass)
    if whole:
        return least, torch.ones_like(kth, dtype=torch.bool)
    enough = ((top_k == 0) | ((top_k <= n) & (kept < n))) & ((top_p == 1) | reached[:, -1:])
    return least, enough


def _sorted(x: Tensor) -> Tensor:
    """Each row in descending order."""
    if x.device.type == "cpu":
        # NumPy's vectorised sort is ten times faster than torch's, which carries indices along.
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return torch.sort(x, dim=-1, descending=True).values


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """`core.sampling.rng.gumbel`, the same function a few rows at a time: int32 [R, 2], [R] → float32 [R, V].

    Core's version has about thirty passes; on a few rows they run in the processor's cache.
    """
    out = torch.empty(position.shape[0], vocab_size, device=seed.device)
    for start in range(0, out.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = rng.gumbel(xp, seed[rows], position[rows], vocab_size)
    return out
