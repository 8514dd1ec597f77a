"""Which of the compiled libraries fits this processor. Standard library only: probes import this."""

from __future__ import annotations

import os
from pathlib import Path

from ....core.errors import ConfigError
from ..cpuinfo import CpuInfo

VARIABLE = "OCTAVO_CPU_KERNELS"
"""Environment variable: the variant to use, one of VARIANTS, in place of the best that the processor has."""

# Best first, with the instructions that the compiler was allowed to use.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
VARIANTS: dict[str, frozenset[str]] = {
    "avx512bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "baseline": frozenset(),
}


def find_library(info: CpuInfo, directory: Path = Path(__file__).parent) -> tuple[str, Path] | None:
    """(variant, file) of the best compiled library that this processor can run; None where there is none.

    Raises:
        ConfigError: the environment asks for a variant that does not exist, was not built, or cannot run here.
    """
    forced = os.environ.get(VARIABLE)
    if forced is not None and forced not in VARIANTS:
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(VARIANTS)}, not {forced!r}.")
    for variant, needed in VARIANTS.items():
        if forced not in (None, variant):
            continue
        file = find_library_of(variant, directory)
        if file and needed <= info.flags:
            return variant, file
        if forced:
            why = "this processor lacks its instructions" if file else "it was not built with the package"
            raise ConfigError(f"{VARIABLE}={forced} cannot be used: {why}. Unset it to take the best there is.")
    return None


def find_library_of(variant: str, directory: Path = Path(__file__).parent) -> Path | None:
    """The file of one variant, where it was built."""
    return next(iter(sorted(directory.glob(f"_{variant}.*so"))), None)
