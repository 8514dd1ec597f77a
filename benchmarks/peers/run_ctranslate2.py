"""CTranslate2's Generator: `generate_batch()` on batches of --batch requests, in order.

A request leaves its batch at its own length (the callback says so), so that no step is wasted on finished ones.
--model is a directory made by ct2-transformers-converter. Needs: ctranslate2.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import common
import ctranslate2


class Engine:
    """A generator."""

    def __init__(self, args: argparse.Namespace) -> None:
        with open(os.path.join(args.model, "vocabulary.json"), encoding="utf-8") as file:
            self.words = json.load(file)
        self.generator = ctranslate2.Generator(
            args.model, device="cpu", compute_type=args.compute, inter_threads=1, intra_threads=args.threads
        )
        self.batch = args.batch
        self.config = {"version": ctranslate2.__version__, "compute": args.compute, "batch": args.batch}

    def generate(self, rows: common.Rows) -> common.Stamps:
        """See `common`."""
        stamps: common.Stamps = []
        for at in range(0, len(rows), self.batch):
            batch = rows[at : at + self.batch]
            mine: common.Stamps = [[] for _ in batch]

            def done(result: ctranslate2.GenerationStepResult, batch: common.Rows = batch, mine=mine) -> bool:
                mine[result.batch_id].append(time.perf_counter())
                return len(mine[result.batch_id]) >= batch[result.batch_id]["max_tokens"]

            self.generator.generate_batch(
                [[self.words[token] for token in row["prompt_ids"]] for row in batch],
                max_batch_size=0,
                max_length=max(row["max_tokens"] for row in batch),
                include_prompt_in_result=False,
                sampling_topk=1,
                end_token=[],
                return_end_token=True,
                callback=done,
            )
            stamps += [s[: row["max_tokens"]] for s, row in zip(mine, batch, strict=True)]
        return stamps


def main() -> None:
    """Runs the workloads."""
    parser = common.parser(__doc__)
    parser.add_argument("--compute", default="float32", help="compute_type: float32, int8, ...")
    parser.add_argument("--batch", type=int, default=16)
    common.main("ctranslate2", Engine, parser.parse_args())


if __name__ == "__main__":
    main()
