"""Parameters on the mesh: one by one, or stacked over the layers for a compiler's loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...core.models.spec import ModelSpec, ParamSpec, layer_params, model_params
from ...core.models.weights import HostTensor, WeightSource, build_params
from .mesh import DeviceMesh
from .work import LANES

UNROLLED = 4
"""Models with more layers than this run as a loop: their programs compile in a fraction of the time."""

Progress = Callable[[int, int], None]


def stackable(model: ModelSpec) -> bool:
    """Whether the layers are alike, and enough to be worth a loop."""
    return model.num_layers > UNROLLED and len(set(model.sliding_window)) == 1


def place(mesh: DeviceMesh, model: ModelSpec, param: ParamSpec, value: HostTensor, dtype: str) -> jax.Array:
    """One parameter on the mesh, padded, in the dtype in force (tables stay float32).

    Each device's part is read by itself, so of a mapped file only that part is, and no whole copy is made.
    """
    padding = mesh.padding(model)
    kind = jnp.dtype("float32" if param.kind == "table" else dtype)

    def read(part: tuple[slice, ...]) -> np.ndarray:
        tensor = padding.read(param, value, part)
        if tensor.dtype == "bfloat16" and kind == ml_dtypes.bfloat16:
            return np.array(tensor.data.view(ml_dtypes.bfloat16))
        # A copy in any case: JAX may keep the memory it is given, and this may be a view of a file.
        source = tensor.float32() if tensor.dtype == "bfloat16" else tensor.data
        return np.array(source, kind)

    return jax.make_array_from_callback(padding.shape(param), mesh.param(param), read)


def load_params(
    model: ModelSpec, weights: WeightSource, mesh: DeviceMesh, dtype: str, progress: Progress | None
) -> dict[str, Any]:
    """The parameter tree; "layers" is a list, or one tree of stacked arrays where the model is `stackable`."""
    stacks: dict[str, Any] = {}
    if stackable(model):
        for name, stack in _stacks(model, mesh, dtype).items():
            stacks[name] = jnp.zeros(stack.shape, stack.dtype, device=stack.sharding)

    def keep(param: ParamSpec, value: HostTensor) -> Any:
        array = place(mesh, model, param, value, dtype)
        if not (stacks and param.path.startswith("layers.")):
            return array
        _, layer, name = param.path.split(".")
        # One layer's array is held twice, never the stack.
        stacks[name] = _fill(stacks[name], np.int32(layer), array)
        return None

    params = build_params(model, weights, keep, progress)
    return params | {"layers": stacks} if stacks else params


def _stacks(model: ModelSpec, mesh: DeviceMesh, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """A layer's parameters for all layers: [layers, ...] of each, and [layers, in / 128, out, 128] of linear ones.

    Inside a loop over layers, the compiler for TPU7x wants weights in tiles of 16 × 128 where arrays have 8 × 128, and
    copies all of them in every step. Where 128 is the whole of the last axis the two are the same order of memory. On
    other chips nothing is lost.
    """
    stacks = {}
    for param in layer_params(model, 0):
        axes: list[str | None] = list(mesh.param(param).spec)
        shape = mesh.padding(model).shape(param)
        shards = mesh.size if param.shard == "row" else 1
        if param.kind == "linear" and shape[1] % (LANES * shards) == 0:
            axes, shape = [axes[1], axes[0], None], (shape[1] // LANES, shape[0], LANES)
        stacks[param.path.rpartition(".")[2]] = jax.ShapeDtypeStruct(
            (model.num_layers, *shape), jnp.dtype(dtype), sharding=mesh.sharding(None, *axes)
        )
    return stacks


@partial(jax.jit, donate_argnums=0)
def _fill(stack: Any, index: Any, array: Any) -> Any:
    if array.ndim < stack.ndim - 1:
        array = jnp.swapaxes(array.reshape(array.shape[0], -1, LANES), 0, 1)
    return stack.at[index].set(array)


def abstract_params(model: ModelSpec, mesh: DeviceMesh, dtype: str) -> dict[str, Any]:
    """The tree that `load_params` would give, as shapes, dtypes and shardings: for compiling without weights."""

    def shape_of(param: ParamSpec) -> jax.ShapeDtypeStruct:
        kind = jnp.float32 if param.kind == "table" else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct(mesh.padding(model).shape(param), kind, sharding=mesh.param(param))

    params: dict[str, Any] = {p.path: shape_of(p) for p in model_params(model) if "." not in p.path}
    if stackable(model):
        return params | {"layers": _stacks(model, mesh, dtype)}
    layers = [layer_params(model, layer) for layer in range(model.num_layers)]
    return params | {"layers": [{p.path.rpartition(".")[2]: shape_of(p) for p in layer} for layer in layers]}
