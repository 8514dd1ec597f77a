"""OpenVINO GenAI's ContinuousBatchingPipeline: all requests added at once, stepped until done.

--model is a directory made by `optimum-cli export openvino --task text-generation-with-past`. Needs: openvino-genai.
"""

from __future__ import annotations

import argparse
import time

import common
import numpy as np
import openvino
import openvino_genai


class Engine:
    """The pipeline, with chunked prefill and its prefix cache."""

    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = args.kv_gib
        scheduler.max_num_batched_tokens = args.max_batch_tokens
        scheduler.max_num_seqs = args.max_num_seqs
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        options = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
        if args.compute:
            options["INFERENCE_PRECISION_HINT"] = args.compute
        self.pipe = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", options)
        self.config = {
            "version": openvino_genai.__version__,
            "compute": args.compute or "its default",
            "max_batch_tokens": args.max_batch_tokens,
            "max_num_seqs": args.max_num_seqs,
        }
        self.count = 0

    def generate(self, rows: common.Rows) -> common.Stamps:
        """See `common`."""
        handles = []
        for row in rows:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = row["max_tokens"], True, False
            ids = openvino.Tensor(np.array([row["prompt_ids"]], dtype=np.int64))
            handles.append(self.pipe.add_request(self.count, ids, config))
            self.count += 1
        stamps: common.Stamps = [[] for _ in rows]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            now = time.perf_counter()
            for mine, handle in zip(stamps, handles, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        mine += [now] * len(output.generated_ids)
        return stamps


def main() -> None:
    """Runs the workloads."""
    parser = common.parser(__doc__)
    parser.add_argument("--compute", default="", help="INFERENCE_PRECISION_HINT: f32 or bf16; empty is its default")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--max-batch-tokens", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    common.main("openvino-genai", Engine, parser.parse_args())


if __name__ == "__main__":
    main()
