"""What an engine will be, before anything is loaded: limits, memory, blocks, shapes. `octavo plan` shows it and
`build_engine` follows it, so the two cannot disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from .. import plugins
from ..backend import (
    Backend,
    BackendConfig,
    BackendFactory,
    DeviceInfo,
    Hosts,
    MemoryPlan,
    StepConstraints,
    StepLimits,
)
from ..config import EngineConfig, flag_of
from ..errors import ConfigError, ContextTooLongError
from ..executor.executor import Executor
from ..models.spec import ModelSpec
from .memory import count_blocks, fit_model_len, size_text


@dataclass(frozen=True)
class EnginePlan:
    """An engine to be.

    Attributes:
        dtype, kv_dtype: in force.
        limits: in force.
        memory: the backend's plan.
        num_blocks: KV blocks, the null block included.
        num_host_blocks: blocks on the host for swapping.
        constraints: the shapes that the backend takes.
    """

    dtype: str
    kv_dtype: str
    limits: StepLimits
    memory: MemoryPlan
    num_blocks: int
    num_host_blocks: int
    constraints: StepConstraints

    @property
    def num_programs(self) -> int:
        """Programs that are compiled at warm-up; 0 where the backend takes any shape."""
        return len(self.constraints.shapes())

    def sequences_at(self, length: int) -> int:
        """How many sequences of so many tokens run at once without preemption."""
        return min(self.limits.max_num_seqs, (self.num_blocks - 1) // -(-length // self.limits.block_size))


class Choices:
    """Collects what was chosen where the user left it open, and says it as it happens."""

    def __init__(self, log: Callable[[str], None] | None = None) -> None:
        self.made: list[str] = []
        self._log = log

    def add(self, text: str) -> None:
        """Notes one choice, a sentence."""
        self.made.append(text)
        if self._log:
            self._log(text)


def choose_device(config: EngineConfig) -> tuple[BackendFactory, DeviceInfo]:
    """The plugin and the device that the configuration asks for. Nothing is started yet.

    Raises:
        DeviceError, ConfigError: there is no such device, or it does not run on several hosts.
    """
    factory, device = plugins.select(config.device, config.backend_options())
    if config.num_hosts > 1 and not factory.multi_host:
        raise ConfigError(
            f"--num-hosts {config.num_hosts}: the plugin {factory.name} runs on one host only. Leave --num-hosts out, "
            "or choose a --device that spans hosts."
        )
    return factory, device


def hosts_of(config: EngineConfig) -> Hosts | None:
    """The hosts that the configuration names; None for this one alone."""
    if config.coordinator is None:
        return None
    return Hosts(config.coordinator, config.num_hosts, config.host_rank)


def create_backend(config: EngineConfig, factory: BackendFactory, device: DeviceInfo) -> Backend:
    """The backend on the chosen device; with several hosts this may wait for the others.

    Raises:
        DeviceError, ConfigError: the device cannot be used, or has no such option.
    """
    options, hosts = config.backend_options(), hosts_of(config)
    for f in fields(config):
        if f.metadata.get("backend") and f.name in options and f.name not in factory.options:
            raise ConfigError(
                f"{flag_of(f)} is not supported by {factory.name}: leave it out, or choose another --device."
            )
    return plugins.create(factory, BackendConfig(device.id, config.dtype, config.kv_cache_dtype, options, hosts))


def plan_limits(config: EngineConfig, spec: ModelSpec, backend: Executor) -> StepLimits:
    """The limits as far as the model and the device decide them; memory may shorten the context yet.

    Raises:
        ConfigError: the model or the device cannot do what was asked for.
    """
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's context length of {spec.max_position} tokens."
        )
    block_size = config.block_size or backend.capabilities().block_sizes[0]
    backend.capabilities().check_model(spec, backend.dtype(spec), backend.kv_dtype(spec), block_size)
    return StepLimits(asked or spec.max_position, config.max_num_seqs, config.max_num_batched_tokens, block_size)


def make_plan(config: EngineConfig, spec: ModelSpec, backend: Executor, device: str, choices: Choices) -> EnginePlan:
    """Plans the engine.

    Raises:
        ConfigError: the model, the device and the options do not go together.
        OutOfMemoryError: it does not fit; the message says what would.
    """
    if config.device == "auto":
        choices.add(f"--device auto chose {device}.")
    if config.dtype == "auto":
        choices.add(f"--dtype auto chose {backend.dtype(spec)} (the checkpoint's is {spec.dtype}).")
    limits = plan_limits(config, spec, backend)
    memory = backend.memory(spec, limits)
    num_blocks = count_blocks(memory, limits, config)
    length = fit_model_len(num_blocks, limits, memory, config.max_model_len)
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
            f"--memory-utilization is {memory.default_utilization}, and the KV cache takes at most "
            f"{memory.default_cache_share:.0%} of memory: this device's defaults."
        )
    try:
        constraints = backend.constraints(spec, limits)
    except ContextTooLongError as error:
        if config.max_model_len is not None:
            raise
        limits = replace(limits, max_model_len=error.max_model_len)
        choices.add(f"--max-model-len is {limits.max_model_len}. {error}")
        constraints = backend.constraints(spec, limits)
    _check_constraints(constraints, limits)
    host_blocks = config.swap_space // memory.block_bytes
    if config.swap_space and not host_blocks:
        raise ConfigError(f"--swap-space must hold at least one block ({size_text(memory.block_bytes)}), or be 0.")
    if host_blocks and not backend.capabilities().swap:
        raise ConfigError(f"{device} cannot swap KV blocks to the host: leave --swap-space at 0.")
    choices.add(
        f"KV cache: {num_blocks - 1} blocks of {limits.block_size} tokens, "
        f"{size_text(num_blocks * memory.block_bytes)}; weights: {size_text(memory.weights)} ({memory.weight_format})."
    )
    return EnginePlan(backend.dtype(spec), backend.kv_dtype(spec), limits, memory, num_blocks, host_blocks, constraints)


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
