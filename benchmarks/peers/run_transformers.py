"""Hugging Face Transformers: `generate()` on static batches of --batch requests, in order.

A batch is left-padded to its longest prompt and runs until its longest output is done; only the tokens that were
asked for are counted. Needs: torch, transformers.
"""

from __future__ import annotations

import argparse
import time

import common
import torch
import transformers


class StepClock(transformers.StoppingCriteria):
    """Notes when each step ended, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Called after each step."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    """A causal language model."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        dtype = getattr(torch, args.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.batch = args.batch
        self.config = {"version": transformers.__version__, "dtype": args.dtype, "batch": args.batch}

    @torch.inference_mode()
    def generate(self, rows: common.Rows) -> common.Stamps:
        """See `common`."""
        pad, stamps = self.model.config.pad_token_id, []
        for at in range(0, len(rows), self.batch):
            batch = rows[at : at + self.batch]
            width = max(len(row["prompt_ids"]) for row in batch)
            fill = [width - len(row["prompt_ids"]) for row in batch]
            clock = StepClock()
            self.model.generate(
                input_ids=torch.tensor([[pad] * n + row["prompt_ids"] for n, row in zip(fill, batch, strict=True)]),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in fill]),
                do_sample=False,
                max_new_tokens=max(row["max_tokens"] for row in batch),
                pad_token_id=pad,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
            stamps += [clock.times[: row["max_tokens"]] for row in batch]
        return stamps


def main() -> None:
    """Runs the workloads."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    common.main("transformers", Engine, parser.parse_args())


if __name__ == "__main__":
    main()
