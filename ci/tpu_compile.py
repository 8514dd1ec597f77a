"""Gate: the real TPU compiler takes the plugin's programs, on a machine without a TPU. See README, "compiles".

    python ci/tpu_compile.py --topology v6e --model llama-3.1-8b --tensor-parallel 1 --json report.json

For one model on one kind of chip it compiles the step with the most tokens and the largest decode, with abstract
weights, and checks what the compiler reports: the cache is donated (aliased byte for byte), each chip's memory holds
it all, and the plan promised enough.

Flops and bytes that the compiler counts stand beside the least that such a step takes (`core/models/cost.py`), with
every sequence as long as its block table. The compiler counts the body of a loop over layers once: what a layer costs
is the difference between models of two layers and of one, unrolled.

It shows that the programs compile and fit, not that they are right or fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

SKIPPED = 77
"""Exit status where libtpu is not installed, as automake has it."""

# Topology of one host, and HBM of a chip (tpu7x: of one of a chip's two devices) in GiB.
CHIPS = {"v4": ("v4:2x2x1", 32), "v5e": ("v5e:2x2", 16), "v5p": ("v5p:2x2x1", 95), "v6e": ("v6e:2x2", 32),
         "tpu7x": ("tpu7x:2x2x1", 96)}  # fmt: skip
MODELS = {
    "demo": {
        "family": "llama", "vocab_size": 49152, "hidden_size": 576, "num_layers": 30, "num_heads": 9,
        "num_kv_heads": 3, "head_dim": 64, "intermediate_size": 1536, "norm_eps": 1e-5, "max_position": 8192,
        "tie_embeddings": True,
    },
    "llama-3.1-8b": {
        "family": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_layers": 32, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 14336, "norm_eps": 1e-5, "max_position": 131072,
    },
}  # fmt: skip


# (chip, model, chips of the mesh); Llama-3.1-8B does not fit on one v5e.
CASES = [
    *((chip, "demo", 1) for chip in ("v5e", "v5p", "v6e", "tpu7x")),
    ("v6e", "demo", 4),
    *((chip, "llama-3.1-8b", 1) for chip in ("v5p", "v6e", "tpu7x")),
    *((chip, "llama-3.1-8b", 4) for chip in ("v5e", "v5p", "v6e", "tpu7x")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=CHIPS, default="v6e")
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="where the report goes; with --all, the table in Markdown")
    parser.add_argument("--all", action="store_true", help="every case of CASES, one after another, as a table")
    args = parser.parse_args()
    if not compiler_ready():
        return SKIPPED
    if args.all:
        return check_all(args)
    from octavo.core.errors import OctavoError

    try:
        report = check(args)
    except OctavoError as error:  # does not fit, or does not divide: the plan says so before anything is compiled
        print(error)
        return 1
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 1 if report["faults"] else 0


def compiler_ready() -> bool:
    """Sets JAX up for compiling without a chip; False, and a line that says so, where a package is missing."""
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            print(f"skipped: {package} is not installed; pip install 'octavo[tpu]' brings it.")
            return False
    # No chip is opened: constants are made on the CPU, and several gates may run side by side.
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    return True


def check_all(args: argparse.Namespace) -> int:
    """Each case in a process of its own; prints a row for each as it is done."""
    head = "| model | chips | context, sequences, tokens | KV blocks | program | compiled in s | temporary MiB |"
    head += " used of HBM | flops over least | bytes over least |"
    rows, failed = [head, "|---" * 10 + "|"], False
    limits = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in limits]
    for chip, model, count in CASES:
        case = ["--topology", chip, "--model", model, "--tensor-parallel", str(count)]
        done = subprocess.run([sys.executable, __file__, *case, *flags], capture_output=True, text=True, check=False)
        if done.returncode:
            failed = True
            print(f"{chip} {model} {count}: {done.stdout}{done.stderr[-2000:]}", file=sys.stderr)
            continue
        report = json.loads(done.stdout)
        for name in ("prefill", "decode"):
            p = report["programs"][name]
            cells = [
                model, f"{count} x {chip}", ", ".join(f"{getattr(args, name):,}" for name in limits),
                f"{report['kv_blocks']:,}", name, p["seconds"], round(p["temp_bytes"] / 2**20, 1),
                f"{p['bytes_used'] / report['hbm_bytes']:.0%}", p["flops_over_least"], p["bytes_over_least"],
            ]  # fmt: skip
            rows.append("| " + " | ".join(map(str, cells)) + " |")
            print(rows[-1], file=sys.stderr)
    table = "\n".join(rows)
    print(table)
    if args.json:
        args.json.write_text(table + "\n")
    return int(failed)


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles and judges; "faults" in the result is empty where all is well."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from octavo.backends.tpu.backend import TpuBackend
    from octavo.backends.tpu.cache import lower_movers, width
    from octavo.backends.tpu.params import abstract_params
    from octavo.backends.tpu.programs import Layout, lower_forward, lower_sampler
    from octavo.core.backend import BackendConfig, Cache, StepLimits
    from octavo.core.config import EngineConfig
    from octavo.core.engine.memory import count_blocks
    from octavo.core.models.cost import step_cost
    from octavo.core.step import StepShape
    from octavo.testing.models import tiny_spec

    topology, gib = CHIPS[args.topology]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[: args.tensor_parallel]
    hbm = gib << 30

    class Abstract(TpuBackend):
        """The backend on chips that are not there."""

        def device_memory(self) -> tuple[int, int]:
            return hbm * len(devices), hbm * len(devices)

    model = tiny_spec(dtype="bfloat16", **MODELS[args.model])
    limits = StepLimits(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens, 16)
    backend = Abstract(BackendConfig("tpu"), devices)
    plan = backend.memory(model, limits)
    blocks = count_blocks(plan, limits, EngineConfig())
    spec, mesh = backend.cache_spec(model, limits), backend.mesh
    stack = jax.ShapeDtypeStruct(
        (spec.num_layers, blocks, spec.block_size, width(spec)), jnp.dtype(spec.dtype), sharding=mesh.cache
    )
    sampled = jax.ShapeDtypeStruct((limits.max_num_seqs + 1,), jnp.int32, sharding=mesh.replicated)
    params = abstract_params(model, mesh, backend.dtype(model))
    layout = Layout(model, backend.ops, mesh, params, Cache(stack, sampled), limits.max_num_seqs)

    shapes = backend.constraints(model, limits).shapes()
    largest = {
        name: max((s for s in shapes if s.decode == (name == "decode")), key=lambda s: s[:4])
        for name in ("prefill", "decode")
    }
    wanted = {name: partial(lower_forward, layout, shape) for name, shape in largest.items()} | {
        "sampler": lambda: lower_sampler(layout, limits.max_num_seqs, shapes[-1].sampler),
    }
    wanted |= {f"{name} blocks": lambda low=low: low for name, low in lower_movers(stack, mesh.replicated).items()}
    cache_bytes = stack.size * stack.dtype.itemsize // mesh.size
    faults, programs = [], {}

    def counted(shape: StepShape, layers: int) -> dict[str, float]:
        """Flops and bytes of a forward pass with so few layers that they are unrolled."""
        small = replace(model, num_layers=layers, sliding_window=())
        cut = Cache(jax.ShapeDtypeStruct((layers, *stack.shape[1:]), stack.dtype, sharding=stack.sharding), sampled)
        of = replace(layout, model=small, cache=cut, params=abstract_params(small, mesh, backend.dtype(model)))
        return lower_forward(of, shape).compile().cost_analysis()

    def against_least(shape: StepShape, whole: dict[str, float]) -> dict[str, float]:
        """What the compiler counts on one chip for all layers, and the least there is to do, split evenly."""
        one, two = counted(shape, 1), counted(shape, 2)
        length = shape.blocks * spec.block_size
        least = step_cost(
            model, shape.tokens, shape.tokens * length, shape.sequences * length, shape.rows,
            jnp.dtype(backend.dtype(model)).itemsize, stack.dtype.itemsize,
        )  # fmt: skip
        report = {}
        for key, name, minimum in (("flops", "flops", least.flops), ("bytes accessed", "bytes", least.bytes)):
            all_layers = whole[key] + (model.num_layers - 1) * (two[key] - one[key])
            report |= {name: all_layers, f"least_{name}": minimum // mesh.size}
            report[f"{name}_per_token"] = round(all_layers / shape.tokens)
            report[f"{name}_over_least"] = round(all_layers * mesh.size / minimum, 3)
        return report

    for name, lower in wanted.items():
        start = time.monotonic()
        compiled = lower().compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        used += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        programs[name] = {
            "seconds": round(time.monotonic() - start, 1),
            "argument_bytes": memory.argument_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
            "bytes_used": used,
            **(against_least(largest[name], cost) if name in largest else {}),
        }
        if used > hbm:
            faults.append(f"{name} takes {used} bytes of a chip's {hbm}")
        if name in ("sampler", "read blocks"):
            continue
        if memory.alias_size_in_bytes != cache_bytes:
            faults.append(f"{name} aliases {memory.alias_size_in_bytes} bytes; the cache has {cache_bytes}")
        if memory.temp_size_in_bytes > plan.activations // mesh.size:
            planned = plan.activations // mesh.size
            faults.append(f"{name} needs {memory.temp_size_in_bytes} bytes of a chip besides; the plan says {planned}")
    return {
        "model": args.model,
        "topology": topology,
        "tensor_parallel": args.tensor_parallel,
        "hbm_bytes": hbm,
        "kv_blocks": blocks,
        "cache_bytes_per_chip": cache_bytes,
        "planned_weight_bytes": plan.weights,
        "planned_activation_bytes": plan.activations,
        "programs": programs,
        "faults": faults,
    }


if __name__ == "__main__":
    sys.exit(main())
