"""A device under test: makes backends for it and moves arrays to and from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core import plugins
from ..core.backend import Backend, BackendConfig, StepLimits
from ..core.models.spec import ModelSpec, ParamSpec, model_params
from ..core.models.weights import HostTensor
from ..core.ops import StepContext
from ..core.step import Step, StepShape, dummy_step, map_arrays
from .models import RandomWeights
from .numbers import rounded


@dataclass(frozen=True)
class DeviceCase:
    """One device in one dtype, written "cpu/bfloat16" or "reference/float32/static=1".

    Attributes:
        device: what `--device` takes.
        dtype: for weights, activations and cache.
        options: for the backend.
    """

    device: str
    dtype: str = "float32"
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> DeviceCase:
        """From the text of `--octavo-device`."""
        device, *rest = text.split("/")
        dtype = next((part for part in rest if "=" not in part), "float32")
        return cls(device, dtype, dict(part.split("=", 1) for part in rest if "=" in part))

    def __str__(self) -> str:
        return "/".join([self.device, self.dtype, *(f"{k}={v}" for k, v in self.options.items())])


class Kit:
    """Makes backends for a device case."""

    def __init__(self, case: DeviceCase) -> None:
        self.case = case
        self.dtype = case.dtype
        self.factory, self.info = plugins.select(case.device, case.options)

    def create(self, **changes: Any) -> Backend:
        """A backend without a model; `changes` to its BackendConfig."""
        config: dict[str, Any] = {"device": self.info.id, "dtype": self.dtype, "options": self.case.options}
        backend = plugins.create(self.factory, BackendConfig(**(config | changes)))
        backend.late_compiles.strict = True
        return backend

    def load(
        self,
        model: ModelSpec,
        limits: StepLimits,
        num_blocks: int,
        num_host_blocks: int = 0,
        warm: bool = False,
        **changes: Any,
    ) -> Loaded:
        """A backend with a model of random weights and a cache; with its programs, if `warm`."""
        backend = self.create(**changes)
        constraints = backend.constraints(model, limits)
        backend.load(model, RandomWeights(dtype="float64" if self.dtype == "float64" else "float32"))
        backend.init_cache(limits, num_blocks, num_host_blocks)
        if warm:
            backend.warmup(constraints.shapes())
        return Loaded(backend, model, limits, self.dtype, num_blocks)


@dataclass
class Loaded:
    """A backend with a model, and shorthands for tests of single ops."""

    backend: Backend
    model: ModelSpec
    limits: StepLimits
    dtype: str
    num_blocks: int

    @property
    def ops(self) -> Any:
        return self.backend.ops

    @property
    def local(self) -> ModelSpec:
        """The model as the ops see it."""
        return self.ops.local_model(self.model)

    @property
    def wide(self) -> str:
        """The name of the dtype of norms and logits."""
        return "float64" if self.ops.wide == self.backend.xp.float64 else "float32"

    def array(self, x: np.ndarray, dtype: str | None = None) -> Any:
        """Floating-point numbers on the device, in the dtype under test unless another is given."""
        dtype = dtype or self.dtype
        host = x.astype(np.float64 if dtype == "float64" else np.float32)
        return self.backend.xp.astype(self.backend.from_host(host), getattr(self.backend.xp, dtype))

    def weight(self, x: np.ndarray, kind: str = "linear") -> Any:
        """A parameter on the device, as `load` would place it."""
        host = HostTensor(x, "float64") if self.dtype == "float64" else HostTensor(x.astype(np.float32), "float32")
        return self.backend.place(ParamSpec("tested", x.shape, kind), host)

    def numpy(self, array: Any) -> np.ndarray:
        """float64 on the host."""
        return self.backend.to_host(array).astype(np.float64)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """What the device has of x, in float64."""
        return rounded(x, self.dtype)

    def parameter(self, path: str) -> np.ndarray:
        """A parameter of the random model as the device has it, in float64."""
        spec = next(p for p in model_params(self.model) if p.path == path)
        source = RandomWeights(dtype="float64" if self.dtype == "float64" else "float32")
        return self.rounded(source.read(spec).data)

    def context(self, step: Step) -> StepContext:
        """What the ops of a step are given."""
        inputs = map_arrays(self.backend.from_host, step.inputs)
        inv_freq = self.backend.from_host(np.asarray(self.model.rope.inv_freq, np.float32))
        cos, sin = self.ops.rotary_table(inv_freq, inputs.positions, self.model.rope.attention_factor)
        plan = self.ops.plan(self.local, step.shape, inputs, self.backend.cache)
        return StepContext(self.local, step.shape, inputs, plan, cos, sin)

    def write(self, slots: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int = 0) -> None:
        """Writes keys and values [T, K, D] into slots [T] of a layer's cache, through the backend's op."""
        tokens, size = len(slots), self.limits.block_size
        shape = StepShape(tokens, 1, -(-tokens // size), 1, False)
        step = dummy_step(shape, self.limits.max_num_seqs, tokens)
        context = self.context(Step(shape, step.inputs._replace(slot_mapping=slots.astype(np.int32))))
        cache = self.layer_cache(layer)
        self.keep_layer_cache(layer, self.ops.write_cache(cache, self.array(k), self.array(v), context))

    def layer_cache(self, layer: int) -> Any:
        """The cache of a layer, as the ops take it."""
        return self.ops.layer_cache(self.backend.cache.layers, layer)

    def keep_layer_cache(self, layer: int, cache: Any) -> None:
        """Makes what an op returned the layer's cache."""
        whole = self.backend.cache
        self.backend.cache = whole._replace(layers=self.ops.with_layer_cache(whole.layers, layer, cache))

    def reset_cache(self) -> None:
        """A cache of zeros."""
        self.backend.init_cache(self.limits, self.num_blocks)
