"""The compiled programs: forward passes by shape and samplers by shape, apart, so that they add and not multiply."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...core.models.decoder import choose, forward
from ...core.models.spec import ModelSpec
from ...core.ops import Ops
from ...core.step import Cache, SamplerShape, StepInput, StepOutput, StepShape, dummy_step
from .mesh import DeviceMesh

Program = Callable[..., tuple[Cache, StepOutput]]


@dataclass(frozen=True)
class Layout:
    """What programs are compiled for: arrays, or their shapes, dtypes and shardings alone.

    Attributes:
        params: the parameter tree.
        cache: the device state.
        max_num_seqs: the engine's.
    """

    model: ModelSpec
    ops: Ops
    mesh: DeviceMesh
    params: Any
    cache: Cache
    max_num_seqs: int


def lower_forward(layout: Layout, shape: StepShape) -> jax.stages.Lowered:
    """(params, cache's layers, sampled, inputs without sampling) → (layers, logits [R, V]); the layers are donated."""

    def run(params: Any, layers: Any, sampled: Any, inputs: StepInput) -> tuple[Any, Any]:
        cache, logits = forward(layout.model, layout.ops, shape, params, Cache(layers, sampled), inputs)
        return cache.layers, logits

    replicated = layout.mesh.replicated
    inputs = dummy_step(shape, layout.max_num_seqs, 1).inputs._replace(sampling=None)
    jitted = jax.jit(run, donate_argnums=1, out_shardings=(layout.cache.layers.sharding, replicated))
    return jitted.lower(layout.params, layout.cache.layers, layout.cache.sampled, _abstract(inputs, replicated))


def lower_sampler(layout: Layout, rows: int, sampler: SamplerShape) -> jax.stages.Lowered:
    """(logits [R, V], sampled, sampling inputs) → (sampled, output); sampled is donated."""
    replicated = layout.mesh.replicated
    shape = StepShape(rows, rows, 1, rows, True, sampler)
    sampling = dummy_step(shape, layout.max_num_seqs, 1).inputs.sampling
    logits = jax.ShapeDtypeStruct((rows, layout.model.vocab_size), jnp.float32, sharding=replicated)
    run = partial(choose, layout.ops, sampler)
    jitted = jax.jit(run, donate_argnums=1, out_shardings=replicated)
    return jitted.lower(logits, layout.cache.sampled, _abstract(sampling, replicated))


def _abstract(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


class Programs:
    """Compiles what a list of shapes needs, several at a time.

    Attributes:
        forwards: by shape, the sampler left out.
        samplers: by rows and sampler.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.forwards: dict[StepShape, Any] = {}
        self.samplers: dict[tuple[int, SamplerShape], Any] = {}

    def compile(self, shapes: Sequence[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the programs of these shapes that are not there yet."""
        forwards = [s for s in dict.fromkeys(map(_forward_key, shapes)) if s not in self.forwards]
        samplers = [s for s in dict.fromkeys(map(_sampler_key, shapes)) if s not in self.samplers]
        total = len(forwards) + len(samplers)
        # Tracing holds Python's lock, compiling does not.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            jobs: list[tuple[Any, Any, Any]] = []
            for shape in forwards:
                lowered = lower_forward(self._layout, shape)
                jobs.append((self.forwards, shape, pool.submit(lowered.compile)))
            for rows, sampler in samplers:
                lowered = lower_sampler(self._layout, rows, sampler)
                jobs.append((self.samplers, (rows, sampler), pool.submit(lowered.compile)))
            for done, (table, key, future) in enumerate(jobs, 1):
                table[key] = future.result()
                if progress:
                    progress(done, total)

    def step(self, shape: StepShape) -> Program:
        """(params, cache, inputs) → (cache, output), of two compiled programs."""
        run, draw = self.forwards[_forward_key(shape)], self.samplers[_sampler_key(shape)]

        def step(params: Any, cache: Cache, inputs: StepInput) -> tuple[Cache, StepOutput]:
            layers, logits = run(params, cache.layers, cache.sampled, inputs._replace(sampling=None))
            sampled, output = draw(logits, cache.sampled, inputs.sampling)
            return Cache(layers, sampled), output

        return step


def _forward_key(shape: StepShape) -> StepShape:
    return shape._replace(sampler=SamplerShape())


def _sampler_key(shape: StepShape) -> tuple[int, SamplerShape]:
    return shape.rows, shape.sampler
