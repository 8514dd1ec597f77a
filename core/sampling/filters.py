"""Top-k, top-p and min-p as one number per row: the least logit that they keep.

No sort and no data-dependent shape: each filter asks for the largest t with some property that holds for small
t and fails for large t, so it is found by bisection. The bisection runs over the float32 numbers themselves in
their order, not over their values: there are less than 2^32 of them, so 32 halvings end at one number, which
is exact whatever the logits are; bisection of values would not separate 1 from 2 next to 1e30.

Semantics: top-k comes first; top-p acts on the distribution renormalised over what top-k kept; min-p is
relative to the likeliest token, which makes it independent of both. (Transformers' warpers in their order.)
Tokens that tie with the last one kept are kept too, so the outcome does not depend on an order among equals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays import device_of

Repeat = Callable[[int, Callable[[Any], Any], Any], Any]

# Float32 numbers in order: code c >= 0 is the float with the bit pattern c, code -c is its negative.
_INFINITY = 0x7F800000
_LOWEST = -(_INFINITY - 1)
_PASSES = 32

_LEAST_FLOAT = -(2.0 - 2.0**-23) * 2.0**127

# 2^(e - 127) for the biased exponents e = 1 to 254. A table, since a device's pow need not be exact.
_POWERS = [2.0 ** (e - 127) for e in range(1, 255)]


def repeat(times: int, body: Callable[[Any], Any], state: Any) -> Any:
    """body applied to the state so many times, one after the other; a compiler may bring a loop of its own."""
    for _ in range(times):
        state = body(state)
    return state


def threshold(xp: Any, logits: Any, top_k: Any, top_p: Any, min_p: Any, repeat: Repeat = repeat) -> Any:
    """The least logit of each row that is kept; a token is kept if its logit is not less.

    The result is a logit of the row, at most its largest. A logit of -inf is kept only in a row of nothing else.
    What exceeds exactness is the rounding of float32 sums in top-p (relative error about 1e-6).

    Args:
        xp: the array namespace.
        logits: float32 [R, V], divided by the temperature.
        top_k: int32 [R]; 0 is off.
        top_p: float32 [R]; 1 is off.
        min_p: float32 [R]; 0 is off.
        repeat: how to run a loop: (times, body, state) → state, where the state is a tuple of arrays.

    Returns:
        float32 [R, 1].
    """
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    largest = xp.max(logits, axis=-1, keepdims=True)
    peak = xp.where(xp.isfinite(largest), largest, 0.0)
    weights = xp.exp(logits - peak)
    lowest = xp.full_like(peak, _LEAST_FLOAT)

    def count(t: Any) -> Any:
        return xp.sum(logits >= t, axis=-1, keepdims=True, dtype=xp.int32)

    def mass(t: Any) -> Any:
        # Every call sums in the same order, and rounding is monotone: fewer weights never sum to more.
        return xp.sum(xp.where(logits >= t, weights, 0.0), axis=-1, keepdims=True)

    # With k above the number of finite logits nothing holds, and the search ends at the lowest number.
    by_rank = _largest(xp, lambda t: count(t) >= top_k, peak, repeat)
    by_rank = xp.where(top_k > 0, by_rank, lowest)
    wanted = top_p * mass(by_rank)
    by_mass = _largest(xp, lambda t: mass(t) >= wanted, peak, repeat)
    by_mass = xp.where(top_p < 1.0, by_mass, lowest)
    by_ratio = peak + xp.log(xp.where(min_p > 0.0, min_p, 1.0))
    by_ratio = xp.where(min_p > 0.0, by_ratio, lowest)

    # Snap up to a logit of the row: a device that flushes denormal numbers then compares like any other.
    # Where rounding left nothing (or all is -inf), the largest stays.
    least = xp.maximum(xp.maximum(by_rank, by_mass), by_ratio)
    return xp.min(xp.where(logits >= least, logits, largest), axis=-1, keepdims=True)


def _largest(xp: Any, holds: Callable[[Any], Any], like: Any, repeat: Repeat) -> Any:
    """The largest finite float32 for which a decreasing predicate holds; the lowest one where it never does.

    Args:
        holds: float32 [R, 1] → bool [R, 1].
        like: an array with the shape and the device of the result.
    """
    low = xp.full_like(like, _LOWEST, dtype=xp.int32)
    high = xp.full_like(like, _INFINITY, dtype=xp.int32)
    powers = xp.asarray(_POWERS, dtype=xp.float32, device=device_of(like))

    def halve(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        # The mean, rounded down, without the overflow of a sum: what both have, and half of what one has.
        middle = (low & high) + ((low ^ high) >> 1)
        ok = holds(_float_of(xp, middle, powers))
        return xp.where(ok, middle, low), xp.where(ok, high, middle)

    low, _ = repeat(_PASSES, halve, (low, high))
    return _float_of(xp, low, powers)


def _float_of(xp: Any, code: Any, powers: Any) -> Any:
    """The float32 with an order code: int32 [R, 1] → float32 [R, 1]. All operations are exact."""
    bits = xp.abs(code)
    exponent = bits >> 23
    fraction = xp.astype(bits & 0x7FFFFF, xp.float32) * 2.0**-23
    # Exponent 0 holds the denormal numbers: the scale of exponent 1 without the leading one.
    leading = xp.astype(exponent > 0, xp.float32)
    scale = xp.take(powers, xp.clip(exponent[:, 0] - 1, min=0), axis=0)[:, None]
    return xp.where(code < 0, -1.0, 1.0) * (leading + fraction) * scale
