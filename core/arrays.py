"""Two things that the array API leaves to the libraries, or that a library leaves out."""

from __future__ import annotations

from typing import Any


def device_of(x: Any) -> Any:
    """Where to make an array that is to meet x: for the `device` argument of creation functions.

    None, "wherever it suits", where x does not say: JAX's traced arrays have no device (the compiler places
    them), and neither have arrays of NumPy 1.
    """
    return getattr(x, "device", None)


def gather(xp: Any, x: Any, ids: Any) -> Any:
    """x[r, ids[r, a]]: [R, V], int32 [R, A] → [R, A]. Libraries differ in the integer that they index with."""
    index = xp.__array_namespace_info__().default_dtypes()["indexing"]
    return xp.take_along_axis(x, xp.astype(ids, index), axis=-1)
