"""What the runners of all peers share: arguments, the loop over workloads, and one JSON line for each of them.

A runner defines `build(args)`, which returns an engine with `config` (a dict to print) and
`generate(rows) -> stamps`: all rows are submitted at once, and for each comes back the list of its output tokens'
`time.perf_counter()` stamps. It uses no package but its peer, so that it runs in that peer's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
Stamps = list[list[float]]

# Text that no measured request shares: it takes what happens once only (lazy imports, first allocations).
WARM_UP: Rows = [
    {"prompt": f"Warm up {i}", "prompt_ids": list(range(1000 + i, 1040 + i)), "max_tokens": 8, "arrival": 0.0}
    for i in range(4)
]


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that every runner takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True)
    made.add_argument("--workloads", required=True, help="directory written by workload.py")
    made.add_argument("--names", default="W1,W2,W3,W5")
    made.add_argument("--repeats", default="0", help="which repeats, for example 0 or 0,1,2")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    return made


def load(folder: str, name: str, repeat: str) -> Rows:
    """The rows of one workload and repeat."""
    with open(os.path.join(folder, f"{name}-r{repeat}.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def quantile(values: list[float], q: float) -> float:
    """The q-quantile, with linear interpolation."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def totals(rows: Rows, wall: float, output: int) -> dict[str, Any]:
    """Counts and rates of a workload that took `wall` seconds."""
    prompt = sum(len(row["prompt_ids"]) for row in rows)
    return {
        "requests": len(rows),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "asked_tokens": sum(row["max_tokens"] for row in rows),
        "wall_s": round(wall, 4),
        "output_tok_s": round(output / wall, 2),
        "total_tok_s": round((prompt + output) / wall, 2),
    }


def single(start: float, stamps: list[float], tokens: int) -> dict[str, float]:
    """Time to the first token and decode rate of one request, as far as its stamps tell them."""
    found = {}
    if tokens == 1 or stamps[-1] > stamps[0]:
        found["ttft_s"] = round(stamps[0] - start, 4)
    if stamps[-1] > stamps[0]:
        found["decode_tok_s"] = round((tokens - 1) / (stamps[-1] - stamps[0]), 2)
    return found


def main(peer: str, build: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> None:
    """Loads, warms up, and prints a line per workload and repeat."""
    begin = time.perf_counter()
    engine = build(args)
    loaded = time.perf_counter() - begin
    engine.generate(WARM_UP)
    engine.generate(WARM_UP[:1])
    for repeat in args.repeats.split(","):
        for name in args.names.split(","):
            rows = load(args.workloads, name, repeat)
            start = time.perf_counter()
            stamps: Stamps = engine.generate(rows)
            output = sum(len(s) for s in stamps)
            line = {
                "peer": peer,
                **engine.config,
                "threads": args.threads,
                "workload": name,
                "repeat": int(repeat),
                "load_s": round(loaded, 2),
                **totals(rows, max(s[-1] for s in stamps) - start, output),
                **(single(start, stamps[0], output) if len(rows) == 1 else {}),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
            print(json.dumps(line), flush=True)
