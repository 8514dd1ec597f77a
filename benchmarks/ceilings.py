"""What this machine can do at most: read bandwidth, and float32 multiply-adds in registers. See ceilings.c.

    python benchmarks/ceilings.py [--threads 2] [--mib 128 256 512]

Prints JSON lines. Arrays as large as a model's weights show what a decode step could read. Needs: a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp")


def measure(threads: int, mib: list[int]) -> list[dict[str, Any]]:
    """Compiles and runs: one {"what": "read", "mib", "gb_s"} for each size, then {"what": ..., "gflop_s"}."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "ceilings"))
        source = Path(__file__).with_name("ceilings.c")
        subprocess.run([os.environ.get("CC", "cc"), *FLAGS, str(source), "-o", program], check=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([program, *map(str, mib)], env=environment, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--mib", type=int, nargs="*", default=[128, 256, 512])
    args = parser.parse_args()
    for line in measure(args.threads, args.mib):
        print(json.dumps({"peer": "machine", "workload": "ceiling", **line}))


if __name__ == "__main__":
    main()
