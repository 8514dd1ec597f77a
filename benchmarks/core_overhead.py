"""The cost of the core itself: time per step and per token on the null backend, at several queue lengths.

    python benchmarks/core_overhead.py [--running 256] [--waiting 0 1000 10000] [--steps 400]

The null backend returns tokens at once, so what is measured is scheduling, block management, batch building, stop
checks and the making of outputs. Every sequence decodes; block boundaries and finished sequences come as they do
in traffic. Beside the median it prints the share of each phase, measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from octavo.backends.null.backend import NullBackend
from octavo.core.backend import BackendConfig, StepLimits
from octavo.core.engine.engine import EngineCore
from octavo.core.engine.types import EngineInfo, EngineRequest
from octavo.core.models.spec import ModelSpec, RopeSpec
from octavo.core.sampling.params import SamplingParams

BLOCK_SIZE = 16


def build(running: int, max_model_len: int = 8192) -> EngineCore:
    """An engine on the null backend with a model of SmolLM2-135M's shape."""
    spec = ModelSpec(
        "llama", 49152, 576, 30, 9, 3, 64, 1536, 1e-5, RopeSpec((1.0,) * 32), max_model_len, eos_token_ids=(2,)
    )
    limits = StepLimits(max_model_len, running, 2048, BLOCK_SIZE)
    backend = NullBackend(BackendConfig("null"))
    backend.load(spec, None)
    num_blocks = running * 64
    backend.init_cache(limits, num_blocks)
    info = EngineInfo(
        "null", "llama", "null", "float32", "float32", spec.vocab_size, [2], max_model_len, running, 2048,
        BLOCK_SIZE, num_blocks, 0, 0, [], [],
    )  # fmt: skip
    return EngineCore(backend, info, limits, backend.constraints(spec, limits), num_blocks, max_waiting=10**6)


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Median and P99 of a step with `running` decoding sequences and `waiting` queued ones."""
    engine = build(running)
    for i in range(running + waiting):
        # Lengths differ, so sequences end and are admitted throughout, as in traffic.
        params = SamplingParams(temperature=0.0, max_tokens=200 + 37 * i % 400, ignore_eos=True)
        prompt = [(i * 7919 + j * 31) % 49152 for j in range(16 + i % 48)]
        engine.add_request(EngineRequest(f"r{i}", prompt, params))
    while engine.scheduler.num_running < running:
        engine.step()
    for _ in range(20):
        engine.step()
    gc.collect()
    gc.freeze()
    times, tokens = [], 0
    for _ in range(steps):
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        tokens += len(outputs)
    gc.unfreeze()
    return {
        "running": running,
        "waiting": engine.scheduler.num_waiting,
        "step_ms_p50": 1e3 * statistics.median(times),
        "step_ms_p99": 1e3 * sorted(times)[int(0.99 * len(times))],
        "us_per_token": 1e6 * sum(times) / tokens,
    }


def main() -> None:
    """Prints one JSON line per queue length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 1000, 10000])
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    for waiting in args.waiting:
        result = measure(args.running, waiting, args.steps)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}), flush=True)


if __name__ == "__main__":
    main()
