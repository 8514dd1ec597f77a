"""The CPU backend: torch on the host."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import ClassVar

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import ConfigError, DeviceError
from ...core.plugins import hookimpl
from ..host import host_memory
from .cpuinfo import cpu_info

NO_TORCH = "it needs torch, which is not installed: pip install 'octavo[cpu]'"


class CpuFactory(BackendFactory):
    """Makes the CPU backend. It probes without importing torch, which takes seconds."""

    name = "cpu"
    description = "torch on the host's processors"
    auto_priority = 10
    options: ClassVar[Mapping[str, str]] = {"threads": "threads that torch computes with (default: torch's own choice)"}

    def probe(self) -> Probe:
        if importlib.util.find_spec("torch") is None:
            return Probe(reasons=(NO_TORCH,))
        info = cpu_info()
        details = {"threads": str(info.threads)}
        if info.features:
            details["instructions"] = ", ".join(info.features)
        return Probe((DeviceInfo("cpu", info.name, host_memory()[0], details),))

    def create(self, config: BackendConfig) -> Backend:
        text = config.options.get("threads")
        if text is not None and not (text.isdecimal() and int(text) >= 1):
            raise ConfigError(f"threads must be a whole number, at least 1, not {text!r}.")
        # OpenMP reads this when torch is first imported: how long a thread spins at a barrier before it sleeps. Its
        # default wastes whole time slices as soon as anything else wants a core (measured beside one busy process: 50
        # times slower decoding); not to spin at all costs a wake-up per operation (1.5 times slower when quiet). 2000
        # turns cost 6 % when quiet.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        try:
            from .backend import CpuBackend
        except ImportError as error:
            raise DeviceError(f"The CPU backend cannot be used: {NO_TORCH} ({error})") from error
        return CpuBackend(config, threads=None if text is None else int(text))


@hookimpl
def octavo_backend() -> BackendFactory:
    return CpuFactory()
