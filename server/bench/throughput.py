"""`octavo bench throughput`: all requests at once, offline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.errors import OctavoError
from ...core.llm import LLM
from ...core.sampling.params import SamplingParams
from . import transformers_baseline
from .report import show, write
from .workload import Row, check_fits


def run(
    config: EngineConfig,
    rows: list[Row] | None,
    made_up: Callable[[int], list[Row]] | None,
    baseline: str | None,
    baseline_batch: int,
    json_file: Path | None,
) -> None:
    """Measures, prints, and writes JSON.

    Args:
        config: the engine.
        rows: the workload, or None.
        made_up: makes it for a vocabulary size, where rows is None.
        baseline: "transformers", or None.
        baseline_batch: its batch size.
        json_file: where results go.

    Raises:
        OctavoError: the engine cannot start, or a request fails.
    """
    if baseline is not None:
        transformers_baseline.check(baseline, config)
    results: dict[str, Any] = {}
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
    with LLM(config.model, **options) as llm:
        if rows is None:
            assert made_up is not None
            rows = made_up(llm.info.vocab_size)
        check_fits(rows, llm.info.max_model_len)
        results["workload"] = {
            "requests": len(rows),
            "prompt_tokens": sum(len(row.prompt_ids) for row in rows),
            "output_tokens": sum(row.max_tokens for row in rows),
        }
        results["octavo"] = {
            "model": llm.info.model,
            "device": llm.info.device,
            "dtype": llm.info.dtype,
            **_measure(llm, rows),
        }
    if baseline is not None:
        results["transformers"] = transformers_baseline.measure(
            config, results["octavo"]["dtype"], rows, baseline_batch
        )
        ratio = results["octavo"]["output_tok_s"] / results["transformers"]["output_tok_s"]
        results["octavo_over_transformers"] = ratio
    show(results)
    write(results, json_file)


def _measure(llm: LLM, rows: list[Row]) -> dict[str, float]:
    # One short request first, so that what happens once only (lazy imports, first allocations) is not measured.
    llm.generate([rows[0].prompt_ids[:8]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), False)
    params = [
        SamplingParams(temperature=0.0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False) for row in rows
    ]
    begin = time.perf_counter()
    outputs = llm.generate([row.prompt_ids for row in rows], params, use_tqdm=False)
    wall = time.perf_counter() - begin
    made = 0
    for row, output in zip(rows, outputs, strict=True):
        count = len(output.outputs[0].token_ids)
        if output.error or count != row.max_tokens:
            raise OctavoError(
                f"A request made {count} of {row.max_tokens} tokens: {output.error or 'no reason given'}."
            )
        made += count
    return rates(wall, sum(len(row.prompt_ids) for row in rows), made)


def rates(wall: float, prompt: int, output: int) -> dict[str, float]:
    """Wall time and tokens per second."""
    return {"wall_s": wall, "output_tok_s": output / wall, "total_tok_s": (prompt + output) / wall}
