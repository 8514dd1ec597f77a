"""Helpers that several test files share: array libraries by name, plain ops over them, sampling inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import array_api_compat.numpy
import numpy as np
import pytest

from octavo.core.ops import Ops
from octavo.core.step import SamplingInput

LIBRARIES = ("numpy", "torch", "jax")


class PlainOps(Ops):
    """Every default of `Ops`, and no cache."""

    def write_cache(self, *args: Any) -> Any:
        raise NotImplementedError

    def attention(self, *args: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Library:
    """An array library: its namespace, and how NumPy arrays become its arrays."""

    xp: Any
    array: Callable[[np.ndarray], Any]

    @property
    def ops(self) -> Ops:
        return PlainOps(self.xp)


def library(name: str) -> Library:
    """The array library of that name; skips the test where it is not installed."""
    if name == "torch":
        torch = pytest.importorskip("torch")
        return Library(pytest.importorskip("array_api_compat.torch"), lambda a: torch.from_numpy(np.array(a)))
    if name == "jax":
        jax = pytest.importorskip("jax")
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", "cpu")  # the libraries are compared on the host
        xp = jax.numpy
        return Library(xp, xp.asarray)
    return Library(array_api_compat.numpy, np.asarray)


def sampling_input(rows: int, adjust: int = 0, **given: Any) -> SamplingInput:
    """Sampling fields with everything off; what is given is broadcast to the field's shape and dtype."""
    defaults: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "out_slots": (0, np.int32, (rows,)),
        "targets": (-1, np.int32, (rows,)),
        "temperature": (1.0, np.float32, (rows,)),
        "top_k": (0, np.int32, (rows,)),
        "top_p": (1.0, np.float32, (rows,)),
        "min_p": (0.0, np.float32, (rows,)),
        "seed": (0, np.int32, (rows, 2)),
        "position": (0, np.int32, (rows,)),
        "repetition": (1.0, np.float32, (rows,)),
        "presence": (0.0, np.float32, (rows,)),
        "frequency": (0.0, np.float32, (rows,)),
        "adjust_ids": (-1, np.int32, (rows, adjust)),
        "adjust_bias": (0.0, np.float32, (rows, adjust)),
        "adjust_counts": (0, np.int32, (rows, adjust)),
        "adjust_seen": (False, bool, (rows, adjust)),
        "only_adjusted": (False, bool, (rows,)),
    }
    assert given.keys() <= defaults.keys()
    return SamplingInput(
        *(
            np.array(np.broadcast_to(np.asarray(given.get(name, value)), shape), dtype)
            for name, (value, dtype, shape) in defaults.items()
        )
    )


def write_tree(root: Path, **files: str) -> None:
    """Writes files under a folder: proc__meminfo="..." becomes proc/meminfo."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def chi_square_limit(degrees: int, z: float = 4.0) -> float:
    """What a chi-square statistic exceeds with the probability of a normal variable exceeding z (here 3e-5).

    Wilson and Hilferty, "The distribution of chi-square", PNAS 17 (1931).
    """
    return degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3


def check_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Asserts that counts are plausible for draws with these probabilities, and that the impossible is absent."""
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = int(possible.sum()) - 1
    assert degrees == 0 or statistic < chi_square_limit(degrees)
