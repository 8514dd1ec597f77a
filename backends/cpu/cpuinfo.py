"""Facts about the host's processors, from the operating system. Standard library only."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ..host import host_threads

# Instructions that decide how fast which dtype is, as Linux spells them (x86 "flags", Arm "Features").
_NOTABLE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "sve", "bf16", "i8mm")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class CpuInfo:
    """The host's processors.

    Attributes:
        name: the model's name, or the architecture where it is not told.
        threads: that are worth having, see `host_threads`.
        features: notable instruction sets.
        flags: all instruction sets that the operating system names.
    """

    name: str
    threads: int
    features: tuple[str, ...]
    flags: frozenset[str] = frozenset()

    @property
    def native_bfloat16(self) -> bool:
        """Whether there are instructions that multiply bfloat16."""
        return not _BFLOAT16.isdisjoint(self.features)


def cpu_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuInfo:
    """What the operating system tells. `cpuinfo` is for tests."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return CpuInfo(name, host_threads(), tuple(f for f in _NOTABLE if f in flags), frozenset(flags))
