"""`octavo bench serve`: a streaming client that loads a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ...core.errors import OctavoError
from .report import show, spread, write
from .workload import Row


@dataclass(frozen=True)
class Load:
    """How to load the server.

    Attributes:
        url: its address.
        model: the model to name; None asks the server.
        api_key: its key.
        rate: requests per second, Poisson; None is all at once.
        concurrency: most requests at once; None is no limit.
        seed: of the arrivals.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0


@dataclass
class _Seen:
    """One request as the client saw it: when it was due, when pieces came, and how many tokens they had."""

    due: float
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


def run(load: Load, rows: list[Row], json_file: Path | None) -> None:
    """Loads the server, prints, and writes JSON.

    Raises:
        OctavoError: the server cannot be reached, or every request failed.
    """
    results = asyncio.run(measure(load, rows))
    show(results)
    write(results, json_file)


async def measure(load: Load, rows: list[Row]) -> dict[str, Any]:
    """Sends all rows and returns the results. Latencies count from when a request was due, so waiting counts."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    url = load.url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as http:
        model = load.model or await _first_model(http, load.url)
        slots = asyncio.Semaphore(load.concurrency or len(rows))
        draw, start, at, work = random.Random(load.seed), time.perf_counter() + 0.05, 0.0, []
        for row in rows:
            work.append(_one(http, model, row, start + at, slots))
            at += draw.expovariate(load.rate) if load.rate else 0.0
        seen = await asyncio.gather(*work)
    return _results(load, rows, start, seen)


async def _first_model(http: httpx.AsyncClient, url: str) -> str:
    try:
        response = await http.get("/v1/models")
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise OctavoError(f"{url} does not tell its models ({error!r}). Is the server up? See --url.") from error


async def _one(http: httpx.AsyncClient, model: str, row: Row, due: float, slots: asyncio.Semaphore) -> _Seen:
    body = {
        "model": model,
        "prompt": row.prompt_ids,
        "max_tokens": row.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = _Seen(due)
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    async with slots:
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    seen.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}"
                    return seen
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _take(seen, json.loads(line[6:]))
        except (httpx.HTTPError, ValueError) as error:
            seen.error = repr(error)
    return seen


def _take(seen: _Seen, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        seen.error = str(chunk["error"])
    if chunk.get("choices"):
        seen.stamps.append(time.perf_counter())
    if chunk.get("usage"):
        seen.tokens = chunk["usage"]["completion_tokens"]


def _results(load: Load, rows: list[Row], start: float, seen: list[_Seen]) -> dict[str, Any]:
    good = [(row, s) for row, s in zip(rows, seen, strict=True) if s.error is None and s.stamps]
    errors = [s.error for s in seen if s.error is not None]
    if not good:
        raise OctavoError(f"Every request failed; the first: {errors[0] if errors else 'it had no output'}")
    wall = max(s.stamps[-1] for _, s in good) - start
    prompt, output = sum(len(row.prompt_ids) for row, _ in good), sum(s.tokens for _, s in good)
    several = [s for _, s in good if s.tokens > 1]
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        **({"first_error": errors[0]} if errors else {}),
        "rate": load.rate,
        "concurrency": load.concurrency,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wall_s": wall,
        "output_tok_s": output / wall,
        "total_tok_s": (prompt + output) / wall,
        "ttft_s": spread([s.stamps[0] - s.due for _, s in good]),
        "itl_s": spread([b - a for _, s in good for a, b in itertools.pairwise(s.stamps)]),
        "tpot_s": spread([(s.stamps[-1] - s.stamps[0]) / (s.tokens - 1) for s in several]),
        "e2e_s": spread([s.stamps[-1] - s.due for _, s in good]),
    }
