"""`octavo bench latency`: one request at a time."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import OctavoError
from ...core.sampling.params import SamplingParams
from .report import show, spread, write
from .workload import Row, check_fits, synthetic


def run(config: EngineConfig, input_len: int, output_len: int, repeats: int, json_file: Path | None) -> None:
    """Measures, prints, and writes JSON.

    Raises:
        OctavoError: the engine cannot start, or a request fails.
    """
    results = asyncio.run(_run(config, input_len, output_len, repeats))
    show(results)
    write(results, json_file)


async def _run(config: EngineConfig, input_len: int, output_len: int, repeats: int) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        check_fits([Row([0] * input_len, output_len)], engine.info.max_model_len)
        runs = []
        for number in range(repeats + 1):
            # Other tokens each time, so that no prefix is cached.
            (row,) = synthetic(1, 1, 1, number, engine.info.vocab_size)
            first = row.prompt_ids[0]
            size = engine.info.vocab_size
            prompt = [(first + 7919 * (number + 1) * i) % size for i in range(input_len)]
            stamps = await _one(engine, prompt, output_len, f"latency-{number}")
            if number:
                runs.append(stamps)
    finally:
        await engine.close()
    gaps = [after - before for stamps in runs for before, after in itertools.pairwise(stamps[1:])]
    return {
        "model": engine.info.model,
        "device": engine.info.device,
        "dtype": engine.info.dtype,
        "input_len": input_len,
        "output_len": output_len,
        "repeats": repeats,
        "ttft_s": spread([stamps[1] - stamps[0] for stamps in runs]),
        "decode_tok_s": spread([(output_len - 1) / (stamps[-1] - stamps[1]) for stamps in runs]),
        "itl_s": spread(gaps),
        "e2e_s": spread([stamps[-1] - stamps[0] for stamps in runs]),
    }


async def _one(engine: AsyncEngine, prompt: list[int], output_len: int, name: str) -> list[float]:
    """The time of the start, and of each delta."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    stamps, made = [time.perf_counter()], 0
    async with aclosing(engine.generate(prompt, params, name)) as outputs:
        async for output in outputs:
            if output.error:
                raise OctavoError(output.error)
            count = sum(len(delta.token_ids) for delta in output.outputs)
            if count:
                stamps.append(time.perf_counter())
            made += count
    if made != output_len:
        raise OctavoError(f"The engine made {made} of {output_len} tokens.")
    return stamps
