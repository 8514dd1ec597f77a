"""Metrics: names, values, and that vLLM's names can be had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live_server import LiveServer

from octavo.core.engine.output import CompletionOutput, RequestOutput
from octavo.core.engine.types import EngineStats
from octavo.core.errors import ConfigError
from octavo.server.metrics import Metrics
from octavo.server.settings import ServerOptions

VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "num_preemptions_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}


def families(text: str) -> dict[str, str]:
    return {name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M) if "_created" not in name}


def value(text: str, sample: str) -> float:
    """A sample's value; `sample` is name{labels} as in the text."""
    (found,) = re.findall(rf"^{re.escape(sample)} (\S+)$", text, re.M)
    return float(found)


@pytest.mark.parametrize("prefix", ["octavo", "vllm"])
def test_names(prefix: str) -> None:
    found = families(Metrics(prefix, "m", EngineStats).render().decode())
    assert {f"{prefix}:{name}": kind for name, kind in VLLM.items()}.items() <= found.items()


def test_the_document_lists_every_metric() -> None:
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `octavo:(\w+)", text, re.M))
    found = families(Metrics("octavo", "m", EngineStats).render().decode())
    assert documented == {name.removeprefix("octavo:") for name in found}


def test_engine_counters() -> None:
    stats = EngineStats(num_running=2, num_waiting=3, kv_blocks=8, kv_blocks_used=2, prefix_queries=10, prefix_hits=4)
    text = Metrics("octavo", 'a"b', lambda: stats).render().decode()
    label = r'{model_name="a\"b"}'
    assert value(text, f"octavo:num_requests_running{label}") == 2
    assert value(text, f"octavo:num_requests_waiting{label}") == 3
    assert value(text, f"octavo:kv_cache_usage_perc{label}") == 0.25
    assert value(text, f"octavo:prefix_cache_hits_total{label}") == 4


def test_two_apps_do_not_share_metrics() -> None:
    one, two = Metrics("octavo", "m", EngineStats), Metrics("octavo", "m", EngineStats)
    one.finished["stop"].inc()
    sample = 'octavo:request_success_total{finished_reason="stop",model_name="m"}'
    assert (value(one.render().decode(), sample), value(two.render().decode(), sample)) == (1, 0)


def test_prefix_is_checked() -> None:
    with pytest.raises(ConfigError, match="--metrics-prefix"):
        Metrics("a b", "m", EngineStats)


def test_timer() -> None:
    metrics = Metrics("o", "m", EngineStats)
    timer = metrics.timer(0.0, 2)
    for tokens, reason in ((1, None), (3, None), (1, "stop")):
        delta = CompletionOutput(0, token_ids=[5] * tokens, finish_reason=reason)  # type: ignore[arg-type]
        timer.observe(RequestOutput("r", None, [1, 2, 3], [delta]))
    timer.close()
    text = metrics.render().decode()
    label = '{model_name="m"}'
    assert value(text, f"o:time_to_first_token_seconds_count{label}") == 1
    assert value(text, f"o:inter_token_latency_seconds_count{label}") == 2
    assert value(text, f"o:time_per_output_token_seconds_count{label}") == 1
    assert value(text, f"o:request_prompt_tokens_sum{label}") == 3
    assert value(text, f"o:request_generation_tokens_sum{label}") == 5
    assert value(text, 'o:request_success_total{finished_reason="stop",model_name="m"}') == 1
    assert value(text, 'o:request_success_total{finished_reason="abort",model_name="m"}') == 1


def test_over_http() -> None:
    with LiveServer(options=ServerOptions(metrics_prefix="vllm", served_model_name="m")) as live:
        live.http.post("/v1/completions", json={"prompt": ["ab", "c"], "max_tokens": 4, "n": 2}).raise_for_status()
        live.http.post("/v1/completions", json={"prompt": "refuse this"})
        response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.text
    assert value(text, 'vllm:request_success_total{finished_reason="length",model_name="m"}') == 4
    assert value(text, 'vllm:request_success_total{finished_reason="abort",model_name="m"}') == 0
    assert value(text, 'vllm:generation_tokens_total{model_name="m"}') == 16
    assert value(text, 'vllm:time_to_first_token_seconds_count{model_name="m"}') == 2
    assert value(text, 'vllm:request_generation_tokens_sum{model_name="m"}') == 16
