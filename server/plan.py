"""`octavo plan`: whether a model fits a device and what it would be there, without loading it."""

from __future__ import annotations

import json
from typing import Any

from ..core import hub
from ..core.config import EngineConfig
from ..core.engine.memory import size_text
from ..core.engine.plan import Choices, choose_device, create_backend, make_plan, plan_limits
from ..core.errors import ConfigError, OutOfMemoryError
from ..core.models.loader import open_model

LENGTHS = (512, 2048, 8192, 32768, 131072)
"""Sequence lengths for which the number of concurrent sequences is told, as far as the context reaches."""


def show(config: EngineConfig, as_json: bool) -> int:
    """Prints the plan. Returns the exit code: 0 when the model fits.

    Raises:
        OctavoError: there is no plan to make: no such model, no such device, or options that contradict.
    """
    plan = describe(config)
    print(json.dumps(plan, indent=2) if as_json else _text(plan))
    return 0 if plan["fits"] else 1


def describe(config: EngineConfig) -> dict[str, Any]:
    """The plan as plain data; sizes in bytes.

    The weights' headers are read, so a damaged checkpoint is found out; their values are not.
    """
    if config.num_hosts > 1:
        raise ConfigError("octavo plan looks at one host only: leave --num-hosts out.")
    model = open_model(hub.resolve(config.model, config.revision), config.tokenizer)
    spec, _ = model.spec, model.weights
    factory, info = choose_device(config)
    backend, device = create_backend(config, factory, info), info.id
    try:
        memory = backend.memory(spec, plan_limits(config, spec, backend))
        out: dict[str, Any] = {
            "model": model.name,
            "family": spec.family,
            "device": device,
            "dtype": backend.dtype(spec),
            "kv_cache_dtype": backend.kv_dtype(spec),
            "memory": {
                "total": memory.total,
                "available": memory.available,
                "weights": memory.weights,
                "activations": memory.activations,
                "kv_block": memory.block_bytes,
            },
        }
        choices = Choices()
        try:
            plan = make_plan(config, spec, backend, device, choices)
        except OutOfMemoryError as error:
            return out | {"fits": False, "why": str(error)}
        limits = plan.limits
        out["memory"]["kv_cache"] = plan.num_blocks * memory.block_bytes
        lengths = sorted({n for n in LENGTHS if n < limits.max_model_len} | {limits.max_model_len})
        return out | {
            "fits": True,
            "block_size": limits.block_size,
            "kv_blocks": plan.num_blocks - 1,
            "max_model_len": limits.max_model_len,
            "sequences_at_length": {str(n): plan.sequences_at(n) for n in lengths},
            "programs_to_compile": plan.num_programs,
            "choices": choices.made,
        }
    finally:
        backend.close()


def _text(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    lines = [
        f"{plan['model']} ({plan['family']}) on {plan['device']}, {plan['dtype']}, KV cache {plan['kv_cache_dtype']}",
        *(f"  {name:<12} {size_text(memory[key])}" for name, key in _SIZES if key in memory),
    ]
    if not plan["fits"]:
        return "\n".join([*lines, f"It does not fit. {plan['why']}"])
    counts = ", ".join(f"{count} of {length} tokens" for length, count in plan["sequences_at_length"].items())
    programs = plan["programs_to_compile"]
    return "\n".join(
        [
            *lines,
            f"It fits: {plan['kv_blocks']} KV blocks of {plan['block_size']} tokens, context {plan['max_model_len']}.",
            f"Sequences at once without preemption: {counts}.",
            f"Programs to compile at start: {programs}." if programs else "Nothing is compiled at start.",
            *(f"  {choice}" for choice in plan["choices"]),
        ]
    )


_SIZES = (
    ("memory", "total"),
    ("free now", "available"),
    ("weights", "weights"),
    ("activations", "activations"),
    ("KV cache", "kv_cache"),
    ("one KV block", "kv_block"),
)
