"""Gate: the real TPU compiler takes the attention kernel, on a machine without a TPU.

    python ci/tpu_kernel_compile.py --topology v6e --json report.json

Beside shapes of models, whole and split over a mesh, it compiles block tables as large as scalar memory allows and
larger ones, which must fail, and a loop over layers that writes a donated cache and reads it with the kernel: the
cache must be neither copied nor kept twice. It shows that the kernel compiles, not that it is right or fast.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_compile import CHIPS, SKIPPED, compiler_ready

CONTEXT = 8192


class Case(NamedTuple):
    """Heads are those of one device."""

    tokens: int
    sequences: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    devices: int = 1
    block_size: int = 16
    window: int | None = None
    dtype: str = "bfloat16"
    cache: str = "bfloat16"


def cases() -> Iterator[Case]:
    """Llama-3.1-8B and the demo model, whole and split: decodes, and prompts with decodes."""
    models = [(32, 8, 128, 1), (8, 2, 128, 4), (9, 3, 64, 1), (3, 1, 64, 3)]
    for model in models:
        for step in ((64, 64), (256, 256), (1024, 64), (2048, 64)):
            for block_size in (16, 32):
                yield Case(*step, *model, block_size)
        for step in ((64, 64), (1024, 64)):
            yield Case(*step, *model, window=1024)
            yield Case(*step, *model, dtype="float32", cache="float32")
            yield Case(*step, *model, cache="float32")
            yield Case(*step, *model, dtype="float32")
    yield Case(1024, 64, 16, 16, 256, dtype="float32", cache="float32")  # the widest rows of a cache
    yield Case(64, 64, 71, 1, 64)  # one key/value head for all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=CHIPS, default="v6e")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not compiler_ready():
        return SKIPPED
    report = check(CHIPS[args.topology][0])
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0


def check(topology: str) -> dict[str, Any]:
    """Compiles everything.

    Raises:
        jax.errors.JaxRuntimeError: something that has to compile does not.
    """
    from jax.experimental import topologies

    from octavo.backends.tpu.work import SCALAR_MEMORY, scalar_bytes

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    kernels = {}
    for case in cases():
        start = time.monotonic()
        compiled = lower(devices, case, CONTEXT // case.block_size).compile()
        cost = compiled.cost_analysis()
        seen = min(CONTEXT, case.window or CONTEXT)
        kernels[str(case)] = {
            "seconds": round(time.monotonic() - start, 2),
            "flops": cost["flops"],
            "least_flops": 4 * case.tokens * case.heads * case.head_dim * seen,
            "bytes_accessed": cost["bytes accessed"],
        }
    small = Case(64, 64, 3, 1, 64)
    blocks = max(b for b in range(1, 5000) if scalar_bytes(64, b, 64) <= SCALAR_MEMORY)
    tables = {
        "within the budget": compiles(devices, small, blocks),
        "beyond the memory": compiles(devices, small, (1 << 20) // 4 // 64),
    }
    return {"topology": topology, "kernels": kernels, "tables": tables, "loop": loop(devices)}


def abstract(mesh: Any, shape: tuple[int, ...], dtype: str, *axes: str | None) -> Any:
    """An array that is not there."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def lower(devices: Any, case: Case, table_blocks: int) -> Any:
    """The kernel on a mesh, each device with its own heads."""
    from functools import partial

    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as Spec

    from octavo.backends.tpu.kernel import ragged_attention

    mesh = Mesh(np.asarray(devices[: case.devices]), ("tp",))
    arrays = (
        abstract(mesh, (case.tokens, case.devices * case.heads, case.head_dim), case.dtype, None, "tp"),
        abstract(
            mesh, (2, 1024, case.block_size, case.devices * case.kv_heads * 2 * case.head_dim), case.cache,
            None, None, None, "tp",
        ),
        abstract(mesh, (), "int32"),
        abstract(mesh, (case.sequences + 1,), "int32"),
        abstract(mesh, (case.sequences,), "int32"),
        abstract(mesh, (case.sequences, table_blocks), "int32"),
    )  # fmt: skip
    attention = partial(
        ragged_attention, scale=case.head_dim**-0.5, window=case.window, kv_heads=case.kv_heads
    )  # fmt: skip
    local = (Spec(None, "tp"), Spec(None, None, None, "tp"), Spec(), Spec(), Spec(), Spec())
    split = jax.shard_map(attention, mesh=mesh, in_specs=local, out_specs=Spec(None, "tp"), check_vma=False)
    return jax.jit(split).lower(*arrays)


def compiles(devices: Any, case: Case, table_blocks: int) -> bool:
    """Whether block tables of that size fit into scalar memory."""
    import jax

    try:
        lower(devices, case, table_blocks).compile()
    except jax.errors.JaxRuntimeError as error:
        if "smem" not in str(error):
            raise
        return False
    return True


def loop(devices: Any) -> dict[str, int]:
    """Layers that write keys and values and attend to them: what the compiler says of the donated cache."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from octavo.backends.tpu.kernel import ragged_attention
    from octavo.backends.tpu.work import plan, sizes

    tokens, sequences, heads, kv_heads, head_dim, layers, blocks, block_size = 64, 64, 32, 8, 128, 4, 2048, 16
    width = kv_heads * 2 * head_dim
    cut = sizes(tokens, heads, kv_heads, head_dim, block_size, jnp.bfloat16, jnp.bfloat16)

    def run(stack: Any, q: Any, slots: Any, query_start: Any, seq_lens: Any, tables: Any) -> Any:
        items = plan(query_start, tokens, cut.queries)

        def one(carry: Any, layer: Any) -> Any:
            stack, q = carry
            pairs = jnp.concatenate([q[:, :kv_heads]] * 2, axis=-1).reshape(tokens, width)
            flat = stack.reshape(-1, width).at[layer * blocks * block_size + slots].set(pairs)
            stack = flat.reshape(stack.shape)
            q = ragged_attention(
                q, stack, layer, query_start, seq_lens, tables,
                scale=1.0, window=None, kv_heads=kv_heads, cut=cut, items=items,
            )  # fmt: skip
            return (stack, q), None

        return jax.lax.scan(one, (stack, q), jnp.arange(layers))[0]

    mesh = Mesh(np.asarray(devices[:1]), ("tp",))
    shapes = [(layers, blocks, block_size, width), (tokens, heads, head_dim)]
    arrays = [abstract(mesh, shape, "bfloat16") for shape in shapes]
    indices = [(tokens,), (sequences + 1,), (sequences,), (sequences, CONTEXT // block_size)]
    arrays += [abstract(mesh, shape, "int32") for shape in indices]
    memory = jax.jit(run, donate_argnums=0).lower(*arrays).compile().memory_analysis()
    return {
        "cache_bytes": layers * blocks * block_size * width * 2,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
