"""Each of the compiled CPU kernels alone, beside the machine's ceilings measured in the same run.

    python benchmarks/cpu_kernels.py [--threads 2] [--variant avx2] [--rows 1 4 16 64 256 1024] [--only linear]

Products run over all matrices of a model of the demo's shape (30 layers and the logits' matrix), one after the other,
as a step does, so nothing stays in a cache that would not stay there in a step. Bytes are those that the work has to
read: weights, keys and values, logits; operations are multiplications and additions. Each line is the median of
--repeats. The ceilings of operations are float32's: products of bfloat16 and of bytes may go beyond them where a
processor has instructions for those. Prints a Markdown table. Needs: octavo[cpu], a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import ceilings
import numpy as np
import torch

from octavo.backends.cpu.cpuinfo import cpu_info
from octavo.backends.cpu.native import library as native
from octavo.backends.cpu.native import variants
from octavo.backends.cpu.native.memory import Arena
from octavo.backends.cpu.native.ops import LayerCache
from octavo.backends.cpu.native.weights import PackedWeight, Storage
from octavo.core.backend import CacheSpec

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCABULARY = 576, 9, 3, 64, 1536, 30, 49152
SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP)] * LAYERS
SHAPES += [(VOCABULARY, HIDDEN)]
BLOCK = 32
STORAGES = {
    "float32": Storage("float32"),
    "bfloat16": Storage("bfloat16"),
    "float16": Storage("float16"),
    "int8": Storage("float32", "int8"),
    "int4": Storage("float32", "int4"),
}
# Sequences, tokens of each in this step, tokens of each in the cache.
BATCHES = [(1, 1, 8192), (16, 1, 2048), (64, 1, 512), (1, 512, 512), (1, 512, 4096)]


class Work(NamedTuple):
    """A kernel on some input."""

    name: str
    call: Callable[[], None]
    bytes: int
    operations: int


def products(library: native.Library, row_counts: list[int]) -> Iterator[Work]:
    """All matrices of a step, for each format and number of rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((max(row_counts), MLP)).astype(np.float32)
    out = torch.empty(max(row_counts), VOCABULARY)
    numbers = rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32).ravel()
    for label, storage in STORAGES.items():
        weights, arena = [], Arena()
        for n, k in SHAPES:
            weight = PackedWeight(library, storage.struct(n, k, n == VOCABULARY), arena)
            library.pack(weight.reference, 0, 0, n, numbers.ctypes.data, 0)
            weights.append(weight)
        size = sum(sum(library.sizes(weight.struct)) for weight in weights)
        for rows in row_counts:

            def call(weights: list[PackedWeight] = weights, rows: int = rows) -> None:
                for weight in weights:
                    library.linear(weight.reference, x.ctypes.data, rows, native.address(out))

            operations = 2 * rows * sum(n * k for n, k in SHAPES)
            yield Work(f"products, {label}, {rows} rows", call, size, operations)


def attention(library: native.Library) -> Iterator[Work]:
    """One layer's attention, with caches in turn that no processor's cache holds together."""
    rng = np.random.default_rng(1)
    model = native.Model(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, 0, 1e-5, HEAD_DIM**-0.5)
    for dtype in ("float32", "bfloat16", "int8"):
        for sequences, new, length in BATCHES:
            blocks = -(-length // BLOCK)
            spec = CacheSpec(1, KV_HEADS, HEAD_DIM, BLOCK, dtype)
            caches = [LayerCache(spec, sequences * blocks + 1, library.lanes) for _ in range(8)]
            tokens = sequences * new
            arrays = {
                "query_start": np.arange(0, tokens + 1, new, dtype=np.int32),
                "seq_lens": np.full(sequences, length, np.int32),
                "block_tables": rng.permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks) + 1,
            }
            step = native.Step(tokens, sequences, blocks, **{name: a.ctypes.data for name, a in arrays.items()})
            q = rng.standard_normal((tokens, HEADS * HEAD_DIM)).astype(np.float32)
            out = np.empty_like(q)

            def call(caches: list[LayerCache] = caches, step=step, keep=arrays, q=q, out=out) -> None:
                library.plan(ctypes.byref(model), ctypes.byref(step), BLOCK, 0)
                for cache in caches:
                    struct = ctypes.byref(cache.struct)
                    library.attention(
                        ctypes.byref(model), ctypes.byref(step), struct, 0, q.ctypes.data, out.ctypes.data
                    )

            pairs = sequences * sum(range(length - new + 1, length + 1))
            width = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / HEAD_DIM}[dtype]
            size = len(caches) * int(2 * sequences * length * KV_HEADS * HEAD_DIM * width)
            yield Work(
                f"attention, {dtype} KV, {sequences} x {new} of {length}", call, size,
                len(caches) * pairs * HEADS * HEAD_DIM * 4,
            )  # fmt: skip


def sampling(library: native.Library) -> Iterator[Work]:
    """Tokens from logits."""
    rng = np.random.default_rng(2)
    rows = 64
    logits = rng.standard_normal((rows, VOCABULARY)).astype(np.float32) * 3
    tokens = np.empty(rows, np.int32)
    fields = {
        "temperature": np.full(rows, 0.8, np.float32),
        "seed": rng.integers(0, 2**31, (rows, 2)).astype(np.int32),
        "position": np.zeros(rows, np.int32),
        "top_k": np.full(rows, VOCABULARY, np.int32),
        "top_p": np.full(rows, 0.9, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }
    for name, used in (("greedy", 0), ("temperature 0.8", 3), ("temperature 0.8, top-p 0.9", 6)):
        struct = native.Sampling(**{key: fields[key].ctypes.data for key in list(fields)[:used]})

        def call(struct: native.Sampling = struct) -> None:
            library.draw(ctypes.byref(struct), logits.ctypes.data, VOCABULARY, rows, VOCABULARY, tokens.ctypes.data)

        yield Work(f"sampling, {name}, {rows} rows", call, logits.nbytes, 0)


def median_seconds(call: Callable[[], None], repeats: int) -> float:
    """The median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cpu_info().threads)
    parser.add_argument("--variant", choices=variants.VARIANTS, help="default: the best that the processor has")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    found = variants.find_library(cpu_info())
    if args.variant:
        found = (args.variant, variants.find_library_of(args.variant))
    if not found or not found[1]:
        raise SystemExit("these kernels were not built with the package")
    library = native.Library(*found, args.threads)

    limits = ceilings.measure(args.threads, [256])
    read, fma = limits[0]["gb_s"], limits[1]["gflop_s"]
    print(f"{cpu_info().name}, {args.threads} threads, kernels {library.variant}")
    print(f"Ceilings: {read:.1f} GB/s read (256 MiB), {fma:.0f} GFLOP/s of float32 multiply-adds\n")
    print("| kernel | ms | GB/s | of the ceiling | GFLOP/s | of the ceiling |\n|---|---|---|---|---|---|")
    for make in (lambda: products(library, args.rows), lambda: attention(library), lambda: sampling(library)):
        for work in make():
            if not work.name.startswith(args.only):
                continue
            seconds = median_seconds(work.call, args.repeats)
            rate, operations = work.bytes / seconds / 1e9, work.operations / seconds / 1e9
            done = f"{operations:.0f} | {operations / fma:.0%}" if operations else " | "
            print(f"| {work.name} | {1e3 * seconds:.2f} | {rate:.1f} | {rate / read:.0%} | {done} |", flush=True)
    # The machine changes under a long run: what the ceiling is at its end.
    print(f"\nAt the end: {ceilings.measure(args.threads, [256])[0]['gb_s']:.1f} GB/s")
    library.close()


if __name__ == "__main__":
    main()
