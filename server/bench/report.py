"""What the benchmarks print, and the JSON they write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """The share-th percentile, interpolated between neighbours. `values` must not be empty."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None where there are no values."""
    if not values:
        return None
    out = {"mean": sum(values) / len(values)}
    out |= {f"p{share}": percentile(values, share) for share in PERCENTILES}
    return {**out, "max": max(values)}


def show(results: Mapping[str, Any], indent: str = "") -> None:
    """Prints results, one line each."""
    for name, value in results.items():
        if isinstance(value, Mapping) and all(isinstance(v, float) for v in value.values()):
            print(f"{indent}{name}: " + "  ".join(f"{k} {_number(v)}" for k, v in value.items()))
        elif isinstance(value, Mapping):
            print(f"{indent}{name}:")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name}: {_number(value)}")


def _number(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )


def write(results: Mapping[str, Any], path: Path | None) -> None:
    """Writes results as JSON, where a file is given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
