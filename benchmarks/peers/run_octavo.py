"""Octavo in process: all requests added at once, the engine stepped until done.

Run it with the Python of an environment that has octavo[cpu].
"""

from __future__ import annotations

import argparse
import time

import common

from octavo.core.config import EngineConfig
from octavo.core.engine.build import build_engine
from octavo.core.engine.types import EngineRequest
from octavo.core.sampling.params import SamplingParams
from octavo.server.version import version


class Engine:
    """Octavo's engine core."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = {"quantization": args.quantization} if args.quantization else {}
        config = EngineConfig(
            model=args.model,
            device="cpu",
            dtype=args.dtype,
            threads=args.threads,
            max_num_seqs=args.max_num_seqs,
            kv_cache_memory=args.kv_gib << 30,
            **options,
        )
        self.engine = build_engine(config)
        self.config = {"version": version(), "dtype": args.dtype, **options, "max_num_seqs": args.max_num_seqs}
        self.count = 0

    def generate(self, rows: common.Rows) -> common.Stamps:
        """See `common`."""
        stamps: dict[str, list[float]] = {}
        for row in rows:
            name = str(self.count)
            self.count += 1
            stamps[name] = []
            params = SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True)
            self.engine.add_request(EngineRequest(name, row["prompt_ids"], params))
        while self.engine.has_work:
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error:
                    raise SystemExit(output.error)
                stamps[output.request_id] += [now] * len(output.token_ids)
        return list(stamps.values())


def main() -> None:
    """Runs the workloads."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="int8 or int4")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    common.main("octavo", Engine, parser.parse_args())


if __name__ == "__main__":
    main()
