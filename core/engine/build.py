"""Puts an engine together: device, model, memory plan, weights, cache, warm-up. Each choice made is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import hub, plugins
from ..backend import Backend, BackendConfig, StepConstraints, StepLimits
from ..config import EngineConfig
from ..errors import ConfigError
from ..models.loader import LoadedModel, open_model
from ..models.spec import ModelSpec
from .engine import EngineCore
from .memory import count_blocks, fit_model_len, size_text
from .types import EngineInfo

Progress = Callable[[str, int, int], None]


def build_engine(
    config: EngineConfig, progress: Progress | None = None, log: Callable[[str], None] | None = None
) -> EngineCore:
    """Builds an engine that is ready to take requests.

    Args:
        config: what to build.
        progress: called with (what, done, in all) while weights load and programs compile.
        log: called with each choice that was left to the engine, a sentence at a time.

    Raises:
        OctavoError: whatever stands in the way, with what to change.
    """
    model = open_model(hub.resolve(config.model, config.revision), config.tokenizer)
    factory, device = plugins.select(config.device, config.backend_option)
    backend = plugins.create(
        factory, BackendConfig(device.id, config.dtype, config.kv_cache_dtype, config.backend_option)
    )
    try:
        return _build(config, model, backend, device.id, progress, log)
    except BaseException:
        backend.close()
        raise


def _build(
    config: EngineConfig,
    model: LoadedModel,
    backend: Backend,
    device: str,
    progress: Progress | None,
    log: Callable[[str], None] | None,
) -> EngineCore:
    spec, choices = model.spec, _Choices(log)
    if config.device == "auto":
        choices.add(f"--device auto chose {device}.")
    if config.dtype == "auto":
        choices.add(f"--dtype auto chose {backend.dtype(spec)} (the checkpoint's is {spec.dtype}).")
    limits = _limits(config, spec, backend.capabilities().block_sizes[0])
    backend.capabilities().check_model(spec, backend.dtype(spec), backend.kv_dtype(spec), limits.block_size)

    plan = backend.memory(spec, limits)
    num_blocks = count_blocks(plan, limits, config)
    length = fit_model_len(num_blocks, limits, plan, config.max_model_len)
    if length < limits.max_model_len:
        choices.add(f"--max-model-len is {length}, as the KV cache holds no more; the model's is {spec.max_position}.")
        limits = replace(limits, max_model_len=length)
    if not config.chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
        raise ConfigError(
            f"--no-chunked-prefill needs --max-num-batched-tokens of at least the context length "
            f"({limits.max_model_len}), as a prompt runs in one step; it is {limits.max_num_batched_tokens}."
        )
    if config.kv_cache_memory is None and config.memory_utilization is None:
        choices.add(
            f"--memory-utilization is {plan.default_utilization}, and the KV cache takes at most "
            f"{plan.default_cache_share:.0%} of memory: this device's defaults."
        )
    constraints = backend.constraints(spec, limits)
    _check_constraints(constraints, limits)
    host_blocks = config.swap_space // plan.block_bytes
    if config.swap_space and not host_blocks:
        raise ConfigError(f"--swap-space must hold at least one block ({size_text(plan.block_bytes)}), or be 0.")
    if host_blocks and not backend.capabilities().swap:
        raise ConfigError(f"{device} cannot swap KV blocks to the host: leave --swap-space at 0.")
    choices.add(
        f"KV cache: {num_blocks - 1} blocks of {limits.block_size} tokens, "
        f"{size_text(num_blocks * plan.block_bytes)}; weights {size_text(plan.weights)}."
    )

    def report(what: str) -> Callable[[int, int], None] | None:
        return (lambda done, total: progress(what, done, total)) if progress else None

    backend.load(spec, model.weights, report("loading weights"))
    backend.init_cache(limits, num_blocks, host_blocks)
    backend.warmup(constraints.shapes(), report("warming up"))
    info = EngineInfo(
        model=config.served_model_name or model.name,
        family=spec.family,
        device=device,
        dtype=backend.dtype(spec),
        kv_dtype=backend.kv_dtype(spec),
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        kv_blocks=num_blocks - 1,
        kv_block_bytes=plan.block_bytes,
        weight_bytes=plan.weights,
        sampling=list(backend.capabilities().sampling),
        choices=choices.made,
    )
    return EngineCore(
        backend,
        info,
        limits,
        constraints,
        num_blocks,
        host_blocks,
        config.prefix_caching,
        config.chunked_prefill,
        config.seed,
        config.max_waiting,
    )


class _Choices:
    """Collects what was chosen, and says it as it happens."""

    def __init__(self, log: Callable[[str], None] | None) -> None:
        self.made: list[str] = []
        self._log = log

    def add(self, text: str) -> None:
        self.made.append(text)
        if self._log:
            self._log(text)


def _limits(config: EngineConfig, spec: ModelSpec, block_size: int) -> StepLimits:
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's context length of {spec.max_position} tokens."
        )
    return StepLimits(
        max_model_len=asked or spec.max_position,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size or block_size,
    )


def _check_constraints(constraints: StepConstraints, limits: StepLimits) -> None:
    """Raises ConfigError when the backend's largest sizes do not cover the limits: a fault of the plugin."""
    for name, buckets, least in (
        ("decode.sequences", constraints.decode.sequences, limits.max_num_seqs),
        ("decode.blocks", constraints.decode.blocks, limits.max_blocks),
        ("prefill.blocks", constraints.prefill.blocks, limits.max_blocks),
        ("prefill.sequences", constraints.prefill.sequences, limits.max_num_seqs if constraints.mixed else 1),
    ):
        if buckets is not None and (not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] < least):
            raise ConfigError(
                f"the device's plugin declares {name} buckets {buckets}: they must rise and reach {least}. "
                f"Try lower --max-num-seqs or --max-model-len."
            )
