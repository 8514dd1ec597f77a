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
        for param in layer_params(model, 0):
            shape = (model.num_layers, *mesh.padding(model).shape(param))
            stacks[param.path.rpartition(".")[2]] = jnp.zeros(
                shape, jnp.dtype(dtype), device=mesh.param(param, stacked=True)
            )

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


@partial(jax.jit, donate_argnums=0)
def _fill(stack: Any, index: Any, array: Any) -> Any:
    return stack.at[index].set(array)


def abstract_params(model: ModelSpec, mesh: DeviceMesh, dtype: str) -> dict[str, Any]:
    """The tree that `load_params` would give, as shapes, dtypes and shardings: for compiling without weights."""
    padding = mesh.padding(model)

    def shape_of(param: ParamSpec, stacked: bool) -> jax.ShapeDtypeStruct:
        shape = padding.shape(param)
        shape = (model.num_layers, *shape) if stacked else shape
        kind = jnp.float32 if param.kind == "table" else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct(shape, kind, sharding=mesh.param(param, stacked))

    params: dict[str, Any] = {p.path: shape_of(p, False) for p in model_params(model) if "." not in p.path}
    layers = range(1) if stackable(model) else range(model.num_layers)
    trees = [
        {p.path.rpartition(".")[2]: shape_of(p, stackable(model)) for p in layer_params(model, layer)}
        for layer in layers
    ]
    return params | {"layers": trees[0] if stackable(model) else trees}
