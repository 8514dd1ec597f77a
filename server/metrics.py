"""Prometheus metrics, named as vLLM's but for the prefix, so that its dashboards fit. The table: docs/metrics.md."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.engine.output import RequestOutput
from ..core.engine.types import EngineStats
from ..core.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")

Buckets = tuple[float, ...]
_FIRST_TOKEN: Buckets = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST_TOKEN += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN: Buckets = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN += (20.0, 40.0, 80.0)
_REQUEST: Buckets = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_REQUEST += (480.0, 960.0, 1920.0, 7680.0)


def _one_two_five(most: int) -> Buckets:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    out: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return tuple(out)
            out.append(float(digit * power))
        power *= 10


class EngineCollector(Collector):
    """The engine's own gauges and counters, read when they are scraped."""

    def __init__(self, prefix: str, model: str, stats: Callable[[], EngineStats]) -> None:
        self._prefix, self._model, self._stats = prefix, model, stats

    def collect(self) -> Iterable[Metric]:
        """One family for each value."""
        s = self._stats()
        usage = s.kv_blocks_used / s.kv_blocks if s.kv_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences with KV blocks on the device.", s.num_running),
            ("num_requests_waiting", "Sequences that wait for admission.", s.num_waiting),
            ("num_requests_swapped", "Of the waiting ones, those whose KV blocks are on the host.", s.num_swapped),
            ("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", usage),
            ("gpu_cache_usage_perc", "The same under the name of older dashboards.", usage),
        ):
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
            ("num_preemptions", "Sequences that had to give up their KV blocks.", s.preemptions),
            ("prompt_tokens", "Prompt tokens of admitted requests.", s.prompt_tokens),
            ("generation_tokens", "Tokens generated.", s.generated_tokens),
            ("computed_tokens", "Tokens run through the model.", s.computed_tokens),
            ("engine_steps", "Steps run.", s.steps),
            ("late_compiles", "Programs compiled after the engine was ready.", s.late_compiles),
        ):
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class Metrics:
    """All metrics of one app, in a registry of its own.

    Args:
        prefix: before the colon; "vllm" gives vLLM's names exactly.
        model: the label model_name.
        stats: gives the engine's latest counters.

    Raises:
        ConfigError: the prefix is not a metric name.
    """

    def __init__(self, prefix: str, model: str, stats: Callable[[], EngineStats]) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise ConfigError(f"--metrics-prefix must be letters, digits and underscores, not {prefix!r}.")
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(prefix, model, stats))

        def histogram(name: str, text: str, buckets: Buckets) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.inter_token = histogram("inter_token_latency_seconds", "From a token to the next.", _PER_TOKEN)
        self.per_token = histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, once per request.", _PER_TOKEN
        )
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _one_two_five(2_000_000))
        self.generation = histogram("request_generation_tokens", "Tokens of a completion.", _one_two_five(2_000_000))
        finished = Counter(
            f"{prefix}:request_success",
            "Completions that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(model, reason) for reason in FINISHED_REASONS}

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def timer(self, arrival: float, n: int) -> RequestTimer:
        """A timer for one prompt with n completions."""
        return RequestTimer(self, arrival, n)


class RequestTimer:
    """Observes one prompt's outputs as they come."""

    def __init__(self, metrics: Metrics, arrival: float, n: int) -> None:
        self._metrics, self._arrival, self._open = metrics, arrival, set(range(n))
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def observe(self, output: RequestOutput) -> None:
        """One delta."""
        m, now = self._metrics, time.perf_counter()
        for delta in output.outputs:
            index, count = delta.index, len(delta.token_ids)
            if count:
                if index in self._last:
                    m.inter_token.observe((now - self._last[index]) / count)
                else:
                    if not self._first:
                        m.first_token.observe(now - self._arrival)
                        m.prompt.observe(len(output.prompt_token_ids))
                    self._first[index] = now
                self._last[index] = now
                self._tokens[index] = self._tokens.get(index, 0) + count
            if delta.finish_reason is not None:
                self._finish(index, delta.finish_reason, now)

    def refused(self) -> None:
        """The engine did not take the request, so it counts nowhere."""
        self._open.clear()

    def close(self) -> None:
        """Counts what has not finished as aborted."""
        for _ in self._open:
            self._metrics.finished["abort"].inc()
        self._open.clear()

    def _finish(self, index: int, reason: str, now: float) -> None:
        m, tokens = self._metrics, self._tokens.get(index, 0)
        self._open.discard(index)
        m.finished[reason].inc()
        m.latency.observe(now - self._arrival)
        m.generation.observe(tokens)
        if tokens > 1:
            m.per_token.observe((now - self._first[index]) / (tokens - 1))
