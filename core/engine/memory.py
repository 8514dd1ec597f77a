"""How many KV blocks there will be: from a backend's memory plan and what the user asked for."""

from __future__ import annotations

import math

from ..backend import MemoryPlan, StepLimits
from ..config import EngineConfig
from ..errors import OutOfMemoryError


def size_text(size: float) -> str:
    """Bytes for a person: "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def count_blocks(plan: MemoryPlan, limits: StepLimits, config: EngineConfig) -> int:
    """KV blocks to allocate, the null block included; never more than all sequences at full length need.

    Raises:
        OutOfMemoryError: the model does not fit, or leaves no room for a single block.
    """
    fixed = plan.weights + plan.activations
    remedy = plan.remedy and f" {plan.remedy}"
    if fixed > plan.available:
        raise OutOfMemoryError(
            f"The model does not fit: weights take {size_text(plan.weights)} and a step up to "
            f"{size_text(plan.activations)}, but {size_text(plan.available)} of {size_text(plan.total)} are free. "
            f"Use a smaller model, a narrower --dtype, fewer --max-num-batched-tokens, or free memory.{remedy}"
        )
    if config.kv_cache_memory is not None:
        room = config.kv_cache_memory
        if fixed + room > plan.available:
            raise OutOfMemoryError(
                f"--kv-cache-memory {size_text(room)} does not fit: with weights and activations "
                f"({size_text(fixed)}) it exceeds the {size_text(plan.available)} that are free. "
                f"At most {size_text(plan.available - fixed)} would."
            )
    else:
        share = plan.default_utilization if config.memory_utilization is None else config.memory_utilization
        if config.memory_utilization is not None and plan.total * share > plan.available:
            free = math.floor(100 * plan.available / plan.total) / 100
            raise OutOfMemoryError(
                f"--memory-utilization {share} asks for {size_text(plan.total * share)}, and "
                f"{size_text(plan.available)} of {size_text(plan.total)} are free. "
                f"At most {free} would fit; or free memory."
            )
        room = int(min(plan.total * share, plan.available)) - fixed
        if config.memory_utilization is None:
            one_sequence = (limits.max_blocks + 1) * plan.block_bytes
            room = min(room, max(int(plan.total * plan.default_cache_share), one_sequence))
        if room < 2 * plan.block_bytes:
            raise OutOfMemoryError(
                f"No room for a KV cache: {share:.0%} of {size_text(plan.total)} is to be used, weights and "
                f"activations take {size_text(fixed)}. Raise --memory-utilization, or use a smaller model or "
                f"dtype.{remedy}"
            )
    blocks = room // plan.block_bytes
    if blocks < 2:
        raise OutOfMemoryError(
            f"The KV cache would have no block: {size_text(room)} are given and one block of {limits.block_size} "
            f"tokens takes {size_text(plan.block_bytes)}. Two are the least."
        )
    return min(blocks, limits.max_num_seqs * limits.max_blocks + 1)


def fit_model_len(blocks: int, limits: StepLimits, plan: MemoryPlan, asked: int | None) -> int:
    """The context length that the blocks can hold.

    Args:
        blocks: allocated, the null block included.
        asked: what the user asked for, or None; asked for, it is held or refused.

    Raises:
        OutOfMemoryError: a sequence of the length asked for does not fit.
    """
    capacity = (blocks - 1) * limits.block_size
    if capacity >= limits.max_model_len:
        return limits.max_model_len
    if asked is not None:
        raise OutOfMemoryError(
            f"--max-model-len {asked} needs {size_text(limits.max_blocks * plan.block_bytes)} of KV cache for one "
            f"sequence, and there is room for {size_text((blocks - 1) * plan.block_bytes)}. Lower it to {capacity} or "
            f"give the cache more memory (--memory-utilization or --kv-cache-memory)."
        )
    return capacity
