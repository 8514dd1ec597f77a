"""Rounding to a device's dtypes on the host, and how far results may be off."""

from __future__ import annotations

import numpy as np

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values that the dtype can hold, nearest to x: what a device really has when it is given x."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype(np.float64)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def assert_close(
    actual: np.ndarray, expected: np.ndarray, dtype: str, units: float, what: str = "", magnitude: float | None = None
) -> None:
    """Largest error ≤ units × epsilon of the dtype × magnitude, which is the largest expected one unless given.

    One bound for all elements: a sum's error depends on its terms, not on how much of them cancels.
    """
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: not all finite"
    if not actual.size:
        return
    magnitude = float(np.abs(expected).max()) if magnitude is None else magnitude
    error = float(np.abs(actual - expected).max())
    unit = EPSILON[dtype] * magnitude
    assert error <= units * unit, f"{what}: off by {error:.3g}, which is {error / unit:.1f} units; {units} are allowed"
