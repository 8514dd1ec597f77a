"""Counter-based random numbers: a draw is a function of (request seed, position, token id) and of nothing else.

So the same seed draws the same noise on every device, in any batch and row, and again after a preemption;
there is no generator state to keep. All bits are made with wrapping int32 arithmetic, which NumPy, torch and
JAX do alike; only the logarithms at the end may differ between libraries, in the last place.

Two levels, because a cryptographically strong generator per vocabulary entry would cost more than the rest of
the sampler: Threefry-2x32 with 20 rounds turns (seed, position) into two 32-bit keys per row, and a keyed
integer hash of 2 multiplications turns (keys, token id) into the noise of each token.

Sources:
    Threefry: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
    The hash: "lowbias32" of C. Wellons, "Prospecting for hash functions" (2018), with a key in its middle;
    ids are spread by Knuth's multiplicative constant before it.
    Gumbel-max: Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import device_of

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of a Python integer."""
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


_GOLDEN = _signed(0x9E3779B9)
_MIX_1 = _signed(0x7FEB352D)
_MIX_2 = _signed(0x846CA68B)


def _shift_right(x: Any, bits: int) -> Any:
    """Logical right shift of int32, by 1 to 31 bits: `>>` on signed integers copies the sign, the mask drops it."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Threefry-2x32, 20 rounds: two words of key, two of counter → two of output. int32 arrays (not scalars)."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + key[0], counter[1] + key[1]
    for r in range(20):
        bits = _ROTATIONS[r % 8]
        x = x + y
        y = (y << bits) | _shift_right(y, 32 - bits)
        y = y ^ x
        if r % 4 == 3:
            injection = r // 4 + 1
            x = x + schedule[injection % 3]
            y = y + schedule[(injection + 1) % 3] + injection
    return x, y


def random_bits(xp: Any, seed: Any, position: Any, vocab_size: int) -> Any:
    """32 random bits per row and token: int32 [R, 2], int32 [R] → int32 [R, V].

    Within a row the map from token id to bits is one-to-one, so no two tokens tie.
    """
    key_0, key_1 = threefry2x32((seed[:, 0], seed[:, 1]), (position, position ^ position))
    ids = xp.arange(vocab_size, dtype=xp.int32, device=device_of(seed))
    h = (ids * _GOLDEN)[None, :] + key_0[:, None]
    h = h ^ _shift_right(h, 16)
    h = h * _MIX_1
    h = h ^ key_1[:, None]
    h = h ^ _shift_right(h, 15)
    h = h * _MIX_2
    return h ^ _shift_right(h, 16)


def uniform(xp: Any, bits: Any) -> Any:
    """int32 bits → float32 in (0, 1): (unsigned bits + 0.5) / 2^32, at most 1 - 2^-24.

    The two halves are scaled apart and added, each exactly, so the one rounding is that of the sum and small
    numbers keep their full relative precision (a plain conversion of 24 bits would make zeros).
    """
    high = xp.astype(_shift_right(bits, 16), xp.float32) * 2.0**-16
    low = (xp.astype(bits & 0xFFFF, xp.float32) + 0.5) * 2.0**-32
    return xp.clip(high + low, max=1.0 - 2.0**-24)


def gumbel(xp: Any, seed: Any, position: Any, vocab_size: int) -> Any:
    """Standard Gumbel noise: int32 [R, 2] (low, high word), int32 [R] → float32 [R, V].

    It is -log(E) with E = -log(1 - u) exponentially distributed: the winner of a Gumbel arg-max has a small E,
    hence a small u, which is where `uniform` is precise.
    """
    u = uniform(xp, random_bits(xp, seed, position, vocab_size))
    return -xp.log(-xp.log1p(-u))


def split_seed(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit seed (signed or unsigned), as int32 values."""
    return _signed(seed), _signed(seed >> 32)


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n samples; in [0, 2^64). Sample 0 keeps the seed itself.

    Counters (index, 1) are never used for noise, whose second word is 0: children are independent streams.
    """
    if index == 0:
        return seed & 0xFFFFFFFFFFFFFFFF
    words = [np.asarray([word], np.int32) for word in (*split_seed(seed), _signed(index), 1)]
    low, high = threefry2x32((words[0], words[1]), (words[2], words[3]))
    return (int(high[0]) & 0xFFFFFFFF) << 32 | (int(low[0]) & 0xFFFFFFFF)
