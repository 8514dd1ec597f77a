"""What a format of weights or of the KV cache costs in quality: perplexity on real text, in one run.

    python benchmarks/perplexity.py MODEL [--windows 16] [--tokens 1024] [--transformers]
        [--variant "dtype=float32" --variant "quantization=int8" ...]

Text is the running Python's language reference, cut into windows; each is a prompt whose tokens' log-probabilities are
asked for. The first variant is the one that the others are held against; --transformers puts Transformers in float32
before it, which needs that package and a model directory. Needs: octavo[cpu].
"""

from __future__ import annotations

import argparse
import gc
import math
import pydoc_data.topics
from collections.abc import Sequence
from typing import Any

from octavo import LLM, SamplingParams

VARIANTS = (
    "dtype=float32",
    "dtype=bfloat16",
    "quantization=int8",
    "quantization=int4",
    "dtype=float32,kv_cache_dtype=int8",
    "quantization=int8,kv_cache_dtype=int8",
)
Windows = list[list[int]]


def windows_of(model: str, count: int, tokens: int) -> Windows:
    """Token ids of consecutive pieces of the text."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    with LLM(model, device="null") as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < count * tokens:
        raise SystemExit(f"the text has only {len(ids)} tokens")
    return [list(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]


def perplexity(log_probabilities: Sequence[float]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-math.fsum(log_probabilities) / len(log_probabilities))


def octavos(model: str, windows: Windows, options: dict[str, Any]) -> float:
    """Through the engine, as it serves."""
    with LLM(model, device="cpu", max_model_len=len(windows[0]) + 8, kv_cache_memory=1 << 30, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(windows, params, use_tqdm=False)
        return perplexity([p.logprob for output in outputs for p in output.prompt_logprobs])


def transformers(model: str, windows: Windows) -> float:
    """An independent reference."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: list[float] = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window])
            scores = torch.log_softmax(net(ids).logits[0, :-1], dim=-1)
            found += scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return perplexity(found)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--variant", action="append", help="comma-separated options of LLM, name=value")
    args = parser.parse_args()
    windows = windows_of(args.model, args.windows, args.tokens)
    print(f"{args.windows} windows of {args.tokens} tokens\n\n| | perplexity | over the first |\n|---|---|---|")
    first = None
    runs = ["Transformers"] if args.transformers else []
    for name in [*runs, *(args.variant or VARIANTS)]:
        if name == "Transformers":
            value = transformers(args.model, windows)
        else:
            value = octavos(args.model, windows, dict(part.split("=", 1) for part in name.split(",")))
        first = first or value
        print(f"| {name.replace(',', ', ')} | {value:.4f} | {value / first - 1:+.2%} |", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
