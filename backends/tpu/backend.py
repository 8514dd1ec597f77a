"""The TPU backend itself; imports JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ...core.backend import (
    Backend,
    BackendConfig,
    CacheSpec,
    Capabilities,
    MemoryPlan,
    StepConstraints,
    StepLimits,
    WeightSource,
)
from ...core.errors import DeviceError, OutOfMemoryError
from ...core.models.spec import DTYPE_BYTES, ModelSpec, ParamSpec, model_params
from ...core.models.weights import HostTensor
from ...core.step import Step, StepInput, StepOutput, StepShape, dummy_step, map_arrays
from ..host import host_memory
from .attend import PIECE_BYTES
from .cache import BlockMover, padded_width, width
from .guard import CompileGuard
from .mesh import DeviceMesh, put
from .ops import TpuOps
from .padding import pad
from .params import load_params, place
from .platform import leave_hosts
from .programs import Layout, Program, Programs
from .shapes import check_scalar_memory, step_constraints

DTYPES = ("bfloat16", "float32")


class TpuBackend(Backend):
    """JAX devices, of one host or several, as a mesh; every step runs as programs that were compiled before traffic."""

    def __init__(self, config: BackendConfig, devices: Sequence[jax.Device]) -> None:
        super().__init__(config)
        self._devices, self._hosts = devices, 1
        if config.hosts:
            self._devices = [device for device in devices if device.process_index == jax.process_index()]
            self._hosts = config.hosts.count
        self._on_host = devices[0].platform == "cpu"
        if self._on_host:
            # The host's memory is not ours alone.
            self.default_utilization, self.default_cache_share = 0.8, 0.2
        self.mesh = DeviceMesh(devices)
        self.xp = jnp
        self._kernel = not self._on_host and config.options.get("attention") != "jnp"
        self.ops = TpuOps(self.mesh, self.dtype, self._kernel)
        self._guard = CompileGuard(self.late_compiles)

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, kv_dtypes=DTYPES, block_sizes=(16, 32, 64, 128))

    def constraints(self, model: ModelSpec, limits: StepLimits) -> StepConstraints:
        constraints = step_constraints(model, limits)
        if self._kernel:
            check_scalar_memory(constraints, limits)
        return constraints

    # Memory

    def device_memory(self) -> tuple[int, int]:
        """Of all devices of the mesh together, as if every host were like this one."""
        if self._on_host:
            total, available = host_memory()
            return total * self._hosts, available * self._hosts
        total = available = 0
        for device in self._devices:
            stats = device.memory_stats()
            if not stats or "bytes_limit" not in stats:
                raise DeviceError(
                    f"{device} does not say how much memory it has, so no KV cache can be planned: update libtpu "
                    f"(pip install -U 'octavo[tpu]')."
                )
            total += stats["bytes_limit"]
            available += stats["bytes_limit"] - stats["bytes_in_use"]
        return total * self._hosts, available * self._hosts

    def cache_spec(self, model: ModelSpec, limits: StepLimits) -> CacheSpec:
        """With the heads and the head width that padding gives."""
        spec = super().cache_spec(model, limits)
        heads = self.mesh.padding(model).spec.num_kv_heads
        return replace(spec, num_kv_heads=heads, head_dim=padded_width(model.head_dim))

    def memory(self, model: ModelSpec, limits: StepLimits) -> MemoryPlan:
        plan = super().memory(self.ops.local_model(model), limits)
        weights, activations = self._needs(self.mesh.size, model, plan.activations)
        return replace(
            plan,
            weights=weights * self.mesh.size,
            activations=activations * self.mesh.size,
            remedy="" if self._on_host else self._remedy(model, plan),
        )

    def _needs(self, devices: int, model: ModelSpec, activations: int) -> tuple[int, int]:
        """(weights, activations) in bytes on each of so many devices."""
        each = DTYPE_BYTES[self.dtype(model)]
        params = model_params(pad(model, devices).spec)
        weights = sum(p.size * (4 if p.kind == "table" else each) // (devices if p.shard else 1) for p in params)
        # Each device computes every token; gathered keys and values, converted, and scores and products with them.
        return weights, activations + 4 * PIECE_BYTES

    def _remedy(self, model: ModelSpec, plan: MemoryPlan) -> str:
        """The least number of such chips that would hold the model, where that is more than there are."""
        chip = plan.total // self.mesh.size
        for devices in (self.mesh.size << n for n in range(1, 7)):
            if sum(self._needs(devices, model, plan.activations)) < chip * plan.default_utilization:
                return f"Or split it over {devices} such chips: --backend-option tensor_parallel={devices}."
        return ""

    # Arrays

    def from_host(self, array: np.ndarray) -> jax.Array:
        return put(array, self.mesh.replicated)

    def to_host(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array)

    def place(self, param: ParamSpec, value: HostTensor) -> jax.Array:
        return place(self.mesh, self.model, param, value, self.dtype(self.model))

    # The model and its cache

    def load(self, model: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self.model = model
        self.params = load_params(model, weights, self.mesh, self.dtype(model), progress)

    def new_layers(self, spec: CacheSpec, num_blocks: int) -> jax.Array:
        shape = (spec.num_layers, num_blocks, spec.block_size, width(spec))
        try:
            stack = jnp.zeros(shape, jnp.dtype(spec.dtype), device=self.mesh.cache).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks of {spec.block_bytes} bytes do not fit into the device's memory; "
                f"lower --memory-utilization or --kv-cache-memory."
            ) from error
        self._mover = BlockMover(stack, self.from_host, self.mesh.replicated)
        return stack

    def export_blocks(self, blocks: np.ndarray) -> np.ndarray:
        with self._guard.watch():
            return self._mover.export(self.cache.layers, blocks)

    def import_blocks(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        with self._guard.watch():
            self.cache = self.cache._replace(layers=self._mover.load(self.cache.layers, blocks, contents))

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        with self._guard.watch():
            self.cache = self.cache._replace(layers=self._mover.copy(self.cache.layers, source, target))

    # Steps

    def compile(self, shape: StepShape) -> Program:
        programs = self._compiler()
        programs.compile([shape])
        return programs.step(shape)

    def warmup(self, shapes: Sequence[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program, several at a time; runs one step, which is enough: nothing is left to first use."""
        programs = self._compiler()
        programs.compile(shapes, progress)
        self._programs = {shape: programs.step(shape) for shape in shapes}
        self._bucketed = True
        self.collect(self.submit(dummy_step(shapes[0], self.limits.max_num_seqs, 1)))
        self._guard.start()

    def _compiler(self) -> Programs:
        return Programs(Layout(self.model, self.ops, self.mesh, self.params, self.cache, self.limits.max_num_seqs))

    def submit(self, step: Step) -> StepOutput:
        """Returns at once: JAX computes in the background."""
        program = self.program(step.shape)
        with self._guard.watch():
            inputs = self._inputs(step.inputs)
            self.cache, output = program(self.params, self.cache, inputs)
            for array in output:
                array.copy_to_host_async()
        return output

    def _inputs(self, inputs: StepInput) -> StepInput:
        if self._hosts > 1:
            return map_arrays(self.from_host, inputs)
        # All at once is faster. The caller overwrites its arrays while JAX may still read, or keep, what it is given.
        return jax.device_put(map_arrays(np.array, inputs), self.mesh.replicated)

    def collect(self, handle: StepOutput) -> StepOutput:
        return map_arrays(self.to_host, handle)

    def close(self) -> None:
        super().close()
        self._guard.stop()
        self._mover = None  # type: ignore[assignment]
        if self._hosts > 1:
            leave_hosts()
