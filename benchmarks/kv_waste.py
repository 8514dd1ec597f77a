"""How much of the KV memory that running requests hold is not used, step by step, over a workload.

    python benchmarks/kv_waste.py [--workload FILE.jsonl] [--block-size 16]

Waste is tokens' worth of blocks held over tokens computed, minus 1, each summed over all steps. Only lengths
matter, so it runs on the null backend. Without a workload: 64 requests with lognormal lengths (mean 207 in, 103 out).
"""

from __future__ import annotations

import argparse
import json

import core_overhead
import numpy as np

from octavo.core.engine.types import EngineRequest
from octavo.core.sampling.params import SamplingParams


def lengths(path: str | None) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) per request."""
    if path is not None:
        with open(path) as file:
            return [(len(row["prompt_ids"]), row["max_tokens"]) for row in map(json.loads, file)]
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(210) - 0.405, 0.9, 64), 16, 1024).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(105) - 0.32, 0.8, 64), 8, 256).astype(int).tolist()
    return list(zip(prompts, outputs, strict=True))


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    core_overhead.BLOCK_SIZE = args.block_size
    engine = core_overhead.build(256)
    for i, (prompt, output) in enumerate(lengths(args.workload)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add_request(EngineRequest(f"r{i}", [(i * 7919 + j) % 49152 for j in range(prompt)], params))
    held = used = 0
    while engine.has_work:
        engine.step()
        scheduler = engine.scheduler
        slots = [seq.slot for seq in scheduler._running]
        held += scheduler.blocks.num_held * args.block_size
        used += int(scheduler.table.computed[slots].sum())
    print(json.dumps({"block_size": args.block_size, "waste_percent": round(100 * (held / used - 1), 2)}))


if __name__ == "__main__":
    main()
