"""Whether anything compiles once an engine is ready, over whole workloads.

    python benchmarks/late_compiles.py --device tpu:cpu --workload W1.jsonl --workload W3.jsonl

All requests of a workload are given at once, greedy with the lengths that the file has. Prints one JSON line a
workload: programs and late compiles before and after it. Exit status 1 if there were any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from octavo import LLM, SamplingParams


def requests(path: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of a workload file, which has `prompt_ids` and `max_tokens` in each line."""
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    params = [SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True) for row in rows]
    return [row["prompt_ids"] for row in rows], params


def run(llm: LLM, path: str) -> dict[str, Any]:
    """One workload."""
    backend = llm._engine.backend

    def programs() -> int:
        return len(backend._programs)

    before, start = {"programs": programs(), "late_compiles": llm.stats().late_compiles}, time.perf_counter()
    outputs = llm.generate(*requests(path), use_tqdm=False)
    return {
        "workload": path,
        "requests": len(outputs),
        "output_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "seconds": round(time.perf_counter() - start, 1),
        "before": before,
        "after": {"programs": programs(), "late_compiles": llm.stats().late_compiles},
    }


def main() -> None:
    """Runs them in turn on one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--workload", action="append", required=True)
    args = parser.parse_args()
    with LLM(args.model, device=args.device, dtype=args.dtype, max_model_len=args.max_model_len) as llm:
        results = [run(llm, path) for path in args.workload]
    for result in results:
        print(json.dumps(result))
    sys.exit(any(r["after"]["late_compiles"] for r in results))


if __name__ == "__main__":
    main()
