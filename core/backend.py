"""The seam: all that Octavo's core and an accelerator's plugin say to each other.

A plugin is a package with an entry point in the group `octavo.backends`. The module it names has one hook
(see `plugins.py`) that returns a `BackendFactory`. The factory probes for devices and creates a `Backend`.

A backend has to give:

* `xp`, an array namespace that follows the Python array API standard (array-api-compat gives one for NumPy,
  torch, CuPy; jax.numpy and mlx nearly are), and `ops`, an `Ops` (see `ops.py`) with two methods of its own:
  `write_cache` and `attention`. Every other op has a default made of `xp`, which may be overridden when the
  device can do better.
* the abstract methods of `Backend`. What is not abstract has a default here.

The core never asks what a backend is. It asks what it can do (`capabilities`), which shapes it takes
(`constraints`), what memory things need (`memory`), and then submits steps.

Order: `capabilities` → `constraints` and `memory` → `load` → `init_cache` → `warmup` → any number of
`submit`/`collect`, `copy_blocks`, `swap_out`, `swap_in` → `close`. All calls come from one thread. Calls that
touch the cache take effect in the order in which they were made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from .errors import ConfigError
from .late import CompileAfterReadyError, LateCompiles
from .models.decoder import step as decoder_step
from .models.spec import DTYPE_BYTES, ModelSpec, ParamSpec, weight_bytes
from .models.weights import HostTensor, WeightSource, build_params
from .ops import Ops, StepContext
from .sampling.params import sampling_fields
from .step import Cache, SamplerShape, Step, StepInput, StepOutput, StepShape, dummy_step, map_arrays

__all__ = [
    "API_VERSION",
    "SUPPORTED_API_VERSIONS",
    "AttentionFeatures",
    "Backend",
    "BackendConfig",
    "BackendFactory",
    "Buckets",
    "Cache",
    "CacheSpec",
    "Capabilities",
    "CompileAfterReadyError",
    "DeviceInfo",
    "HostTensor",
    "Hosts",
    "MemoryPlan",
    "ModelSpec",
    "Ops",
    "ParamSpec",
    "Probe",
    "SamplerShape",
    "Step",
    "StepConstraints",
    "StepContext",
    "StepInput",
    "StepLimits",
    "StepOutput",
    "StepShape",
    "WeightSource",
]

API_VERSION = 1
SUPPORTED_API_VERSIONS = (1,)
"""The versions of this interface that a plugin may have been written for: this one and, later, the one before."""


# ---------------------------------------------------------------------------------------------- discovery


@dataclass(frozen=True)
class DeviceInfo:
    """One usable device.

    Attributes:
        id: what `--device` takes, for example "cpu" or "cuda:0".
        name: what a person calls it, for example "NVIDIA H200".
        memory_bytes: memory that models and cache can use in all; 0 where it cannot be known beforehand.
        details: further facts for `octavo devices`, for example {"threads": "8"}.
        stands_in: for a device that only simulates the plugin's hardware: the backend options that ask for it. It is
            taken by its id, or by the plugin's name together with these options; never by `auto` nor by the name
            alone, so nobody gets a simulation who asked for the hardware.
    """

    id: str
    name: str
    memory_bytes: int = 0
    details: Mapping[str, str] = field(default_factory=dict)
    stands_in: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """What a factory found on this machine.

    Attributes:
        devices: usable devices, the one to prefer first.
        reasons: where there are none, why, and what the user could do about it, a sentence each; otherwise
            remarks worth showing.
    """

    devices: tuple[DeviceInfo, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hosts:
    """The hosts that run one engine together, and which of them this is.

    Attributes:
        coordinator: "host:port" on rank 0, which every host can reach. The port is the backend's own, for its
            collectives; the next one is the core's (`core/executor/`).
        count: hosts in all, at least 2.
        rank: this one, from 0. Rank 0 has the engine; the others do what it tells them.
    """

    coordinator: str
    count: int
    rank: int


@dataclass(frozen=True)
class BackendConfig:
    """What a backend is created with.

    Attributes:
        device: the id of one of the probed devices.
        dtype: dtype of weights and activations, or "auto": the backend's choice for the model (`pick_dtype`).
        kv_dtype: dtype of the KV cache, or "auto": as `dtype`.
        options: `--backend-option key=value` as given; a backend refuses keys it does not know.
        hosts: the hosts to run on together; None is this one alone.
    """

    device: str
    dtype: str = "auto"
    kv_dtype: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    hosts: Hosts | None = None


class BackendFactory(ABC):
    """Finds devices and makes backends for them. Importing its module must be cheap: no torch, no jax.

    Attributes:
        name: what `--device` takes for any of its devices, for example "cuda".
        description: one line for `octavo devices`.
        api_version: the `API_VERSION` that it was written for.
        auto_priority: `--device auto` takes the factory with the highest priority among those with devices;
            negative is never taken.
        multi_host: whether its backends honour `BackendConfig.hosts`. Asked before a backend is made, as making one
            may wait for the other hosts. Such a backend makes the same calls take effect together on all hosts, and
            its `device_memory` is that of all hosts as if they were like this one.
        options: the `--backend-option` keys that it knows, each with a line of help.
    """

    name: str
    description: str = ""
    api_version: int = API_VERSION
    auto_priority: int = 0
    multi_host: bool = False
    options: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def probe(self) -> Probe:
        """Looks for devices. Must not create a device context, start a compiler or take memory."""

    @abstractmethod
    def create(self, config: BackendConfig) -> Backend:
        """Makes the backend for one device.

        Raises:
            DeviceError: the device cannot be used after all.
            ConfigError: an option has a value that it cannot honour.
        """


# -------------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True)
class AttentionFeatures:
    """Which kinds of attention `Ops.attention` computes.

    Attributes:
        sliding_window: a window of last tokens per layer.
        head_dims: the head widths it takes; None is any.
    """

    sliding_window: bool = True
    head_dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Data: it is printed, checked before loading, and made into the support matrix.

    Attributes:
        dtypes: dtypes for weights and activations.
        kv_dtypes: dtypes for the KV cache.
        block_sizes: tokens per KV block that it takes, the preferred one first.
        attention: kinds of attention.
        sampling: the fields of SamplingParams that it honours; a request that uses another one is refused.
        swap: whether `swap_out` and `swap_in` work, so preemption can move blocks to the host.
    """

    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...] = (16,)
    attention: AttentionFeatures = AttentionFeatures()
    sampling: tuple[str, ...] = field(default_factory=sampling_fields)
    swap: bool = True

    def check_model(self, model: ModelSpec, dtype: str, kv_dtype: str, block_size: int) -> None:
        """Raises ConfigError when the model cannot run as asked, with what would work."""
        for what, value, allowed in (
            ("--dtype", dtype, self.dtypes),
            ("--kv-cache-dtype", kv_dtype, self.kv_dtypes),
            ("--block-size", block_size, self.block_sizes),
            ("a head width of", model.head_dim, self.attention.head_dims),
        ):
            if allowed is not None and value not in allowed:
                choices = ", ".join(str(a) for a in allowed)
                raise ConfigError(f"{what} {value} is not supported by this device; it supports {choices}.")
        if any(model.sliding_window) and not self.attention.sliding_window:
            raise ConfigError(f"{model.family} models use a sliding window, which this device does not support.")


@dataclass(frozen=True)
class StepLimits:
    """The bounds within which the engine will stay.

    Attributes:
        max_model_len: tokens per sequence, prompt and output.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens per step.
        block_size: tokens per KV block.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        """Blocks that the longest sequence needs."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class Buckets:
    """The sizes that a step's shape may have; a step is padded to the next one. None: any size, unpadded.

    Attributes:
        tokens: for T.
        sequences: for S (and R).
        blocks: for B.
    """

    tokens: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepConstraints:
    """Which steps a backend takes. The scheduler and the batch builder obey; nothing else adapts to a device.

    Attributes:
        decode: sizes of steps in which every sequence has one token (T = S: the sequence buckets count).
        prefill: sizes of all other steps.
        mixed: whether decodes may share a step with prefill chunks.
        samplers: the sampler shapes that it compiles, smallest first; None: any. A request that none of them
            covers is refused when it arrives.
        max_in_flight: steps that may be submitted before the first is collected: 2 hides the host's work.
    """

    decode: Buckets = Buckets()
    prefill: Buckets = Buckets()
    mixed: bool = True
    samplers: tuple[SamplerShape, ...] | None = None
    max_in_flight: int = 1

    def shapes(self) -> list[StepShape]:
        """Every shape that a step can have, or [] where some size is free. `warmup` prepares these.

        A step has at most as many sequences as tokens, so sizes that only more sequences would need are left out.
        """
        out = []
        for decode, sizes in ((True, self.decode), (False, self.prefill)):
            if sizes.sequences is None or sizes.blocks is None or self.samplers is None:
                return []
            if not decode and sizes.tokens is None:
                return []
            for below, sequences in zip((0, *sizes.sequences), sizes.sequences, strict=False):
                for tokens in (sequences,) if decode else sizes.tokens or ():
                    if below >= tokens:
                        continue
                    for blocks in sizes.blocks:
                        for sampler in self.samplers:
                            out.append(StepShape(tokens, sequences, blocks, sequences, decode, sampler))
        return out


@dataclass(frozen=True)
class CacheSpec:
    """The KV cache of a model: paged keys and values, the same number of blocks for every layer.

    Attributes:
        num_layers: layers.
        num_kv_heads: key/value heads on this backend.
        head_dim: width of a head.
        block_size: tokens per block.
        dtype: dtype of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, without any padding that a layout may add."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return per_token * self.block_size


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes on the device, in bytes. The allocator and `octavo plan` use the same numbers.

    Attributes:
        total: the device's memory.
        available: what is free of it now, before the weights are loaded.
        weights: parameters.
        weight_format: how matrices are kept, for messages: a dtype, or a format of few bits.
        activations: the most that a step needs besides.
        block_bytes: one KV block over all layers, as the backend lays it out.
        default_utilization: the share of `total` to use when neither `--memory-utilization` nor
            `--kv-cache-memory` is given.
        default_cache_share: the most of `total` that the KV cache takes then, unless one sequence needs more.
        remedy: what else would make room on this backend, a sentence for errors, such as more chips; or "".
    """

    total: int
    available: int
    weights: int
    activations: int
    block_bytes: int
    default_utilization: float = 0.9
    default_cache_share: float = 1.0
    remedy: str = ""
    weight_format: str = ""


# ------------------------------------------------------------------------------------------------ backend


class Backend(ABC):
    """One device (or several that act as one) with a model on it.

    Attributes:
        xp: the array namespace.
        ops: the operations of the forward pass.
        config: what it was created with.
        model: the model, once `load` was called.
        params: the parameter tree, once `load` was called.
        cache: the device state, once `init_cache` was called.
        late_compiles: programs made after warm-up.
    """

    xp: Any
    ops: Ops
    model: ModelSpec
    params: Any
    cache: Cache

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.late_compiles = LateCompiles()
        self._programs: dict[StepShape, Callable[..., tuple[Cache, StepOutput]]] = {}
        self._bucketed = False
        self._host_blocks: np.ndarray | None = None

    # What it is able to do

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this device can do."""

    @abstractmethod
    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        """Which steps it takes for this model within these limits.

        Raises:
            ContextTooLongError: the context is too long for it; where the user asked for none, a shorter one is taken.
            ConfigError: it cannot take these limits.
        """

    @abstractmethod
    def device_memory(self) -> tuple[int, int]:
        """(total, available) bytes of the device's memory now."""

    def pick_dtype(self, model: ModelSpec) -> str:
        """The dtype that "auto" stands for. Default: the checkpoint's, or else the first supported one."""
        dtypes = self.capabilities().dtypes
        return model.dtype if model.dtype in dtypes else dtypes[0]

    def dtype(self, model: ModelSpec) -> str:
        """The dtype in force for weights and activations."""
        return self.pick_dtype(model) if self.config.dtype == "auto" else self.config.dtype

    def kv_dtype(self, model: ModelSpec) -> str:
        """The dtype in force for the KV cache."""
        return self.dtype(model) if self.config.kv_dtype == "auto" else self.config.kv_dtype

    def cache_spec(self, model: ModelSpec, limits: StepLimits) -> CacheSpec:
        """The KV cache that the model needs on this backend."""
        return CacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, limits.block_size, self.kv_dtype(model))

    default_utilization: float = 0.9
    default_cache_share: float = 1.0

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        """What the model takes, computed without loading it.

        Default: weights in `dtype`; for activations, the widest intermediate of a full step a few times over,
        and float32 logits of a full batch for the sampler.
        """
        total, available = self.device_memory()
        width = max(model.intermediate_size * 3, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * 2)
        per_token = (width + 4 * model.hidden_size) * DTYPE_BYTES[self.dtype(model)]
        logits = limits.max_num_seqs * model.vocab_size * 4 * 4
        return MemoryPlan(
            total=total,
            available=available,
            weights=weight_bytes(model, self.dtype(model)),
            weight_format=self.dtype(model),
            activations=limits.max_num_batched_tokens * per_token + logits,
            block_bytes=self.cache_spec(model, limits).block_bytes,
            default_utilization=self.default_utilization,
            default_cache_share=self.default_cache_share,
        )

    # Arrays

    @abstractmethod
    def from_host(self, array: np.ndarray) -> Any:
        """A device array with the values and the dtype of a NumPy array. It must not alias it."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """A NumPy array with the values of a device array; waits until they are there."""

    @abstractmethod
    def place(self, param: ParamSpec, value: HostTensor) -> Any:
        """Puts one parameter on the device, in the dtype in force. Must copy: `value` may be a file's view."""

    # The model and its cache

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        """Loads the weights. `progress` is called with (parameters placed, parameters in all).

        Default: `place` for each parameter. Override to pack or fuse weights for the ops that are overridden.
        """
        self.model = model
        self.params = build_params(model, weights, self.place, progress)

    @abstractmethod
    def new_layers(self, spec: CacheSpec, num_blocks: int) -> Any:
        """Allocates `Cache.layers`: num_blocks blocks, zeroed, in any layout that the backend's ops like.

        Raises:
            OutOfMemoryError: the device does not have that much memory.
        """

    def init_cache(self, limits: StepLimits, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the device state: KV blocks (block 0, the null block, included) and host blocks for swap.

        Default: `new_layers`, and a NumPy pool on the host.
        """
        spec = self.cache_spec(self.model, limits)
        self.limits = limits
        sampled = self.from_host(np.zeros(limits.max_num_seqs + 1, np.int32))
        self.cache = Cache(self.new_layers(spec, num_blocks), sampled)
        if num_host_blocks:
            self._host_blocks = np.zeros(
                (num_host_blocks, self.export_blocks(np.zeros(1, np.int32)).shape[1]), np.uint8
            )

    @abstractmethod
    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """The contents of KV blocks over all layers: int32 [n] → uint8 [n, bytes]. Opaque to the core."""

    @abstractmethod
    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        """Writes what `export_blocks` gave into other (or the same) blocks."""

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies KV blocks on the device, over all layers. int32 [n] each; targets are distinct, and no source."""
        self.import_blocks(target, self.export_blocks(source))

    def swap_out(self, blocks: np.ndarray, host_blocks: np.ndarray) -> None:
        """Copies device blocks to host blocks. int32 [n] each."""
        assert self._host_blocks is not None, "init_cache was called without host blocks"
        self._host_blocks[host_blocks] = self.export_blocks(blocks)

    def swap_in(self, host_blocks: np.ndarray, blocks: np.ndarray) -> None:
        """Copies host blocks to device blocks. int32 [n] each."""
        assert self._host_blocks is not None, "init_cache was called without host blocks"
        self.import_blocks(blocks, self._host_blocks[host_blocks])

    # Steps

    def compile(self, shape: StepShape) -> Callable[..., tuple[Cache, StepOutput]]:
        """A function (params, cache, inputs) → (cache, output) for one shape. Default: not compiled."""
        return partial(decoder_step, self.model, self.ops, shape)

    def warmup(self, shapes: Sequence[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Prepares and runs every shape once. After it, a shape that is not among them is refused or warned of.

        Args:
            shapes: from `StepConstraints.shapes`; empty where the backend takes any shape.
            progress: called with (shapes done, shapes in all).
        """
        for done, shape in enumerate(shapes, 1):
            self._programs[shape] = self.compile(shape)
            longest = min(self.limits.max_model_len, shape.blocks * self.limits.block_size)
            self.collect(self.submit(dummy_step(shape, self.limits.max_num_seqs, longest)))
            if progress:
                progress(done, len(shapes))
        self._bucketed = bool(shapes)

    def program(self, shape: StepShape) -> Callable[..., tuple[Cache, StepOutput]]:
        """The program for a shape; made on first use where the backend takes any shape.

        Raises:
            CompileAfterReadyError: the backend has buckets and this is none of them, where that is an error; otherwise
                it is counted, and made.
        """
        program = self._programs.get(shape)
        if program is not None:
            return program
        if self._bucketed:
            self.late_compiles.add(f"A program for {shape} was needed")
            self._programs[shape] = self.compile(shape)
            return self._programs[shape]
        return self.compile(shape)

    def submit(self, step: Step) -> Any:
        """Starts a step and returns a handle for `collect`. May return before the step has run.

        Default: runs the program on the device's arrays; the handle is the StepOutput.
        """
        inputs = map_arrays(self.from_host, step.inputs)
        self.cache, output = self.program(step.shape)(self.params, self.cache, inputs)
        return output

    def collect(self, handle: Any) -> StepOutput:
        """Waits for a step and returns its output as NumPy arrays. Handles are collected in order."""
        return map_arrays(self.to_host, handle)

    def check(self) -> None:  # noqa: B027 - there is nothing to override for most
        """Called now and then while there is nothing to run. Default: nothing.

        Raises:
            EngineDeadError: the device is lost.
        """

    def close(self) -> None:
        """Frees the device. No call follows. Default: drops the references."""
        self.params = self.cache = None  # type: ignore[assignment]
        self._programs.clear()
        self._host_blocks = None
