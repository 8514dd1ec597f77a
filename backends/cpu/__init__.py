"""The CPU backend: compiled kernels and torch on the host."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import ConfigError, DeviceError
from ...core.plugins import hookimpl
from ..host import host_memory
from .cpuinfo import cpu_info
from .native.variants import find_library

NO_TORCH = "it needs torch, which is not installed: pip install 'octavo[cpu]'"


class CpuFactory(BackendFactory):
    """Makes the CPU backend. It probes without importing torch, which takes seconds."""

    name = "cpu"
    description = "compiled kernels and torch on the host's processors"
    auto_priority = 10
    options: ClassVar[Mapping[str, str]] = {
        "threads": "as --threads (default: one for each core that this process may use, by affinity and quota)",
        "quantization": "as --quantization; needs the native kernels",
        "kernels": "native, the compiled ones (default where they were built), or torch",
    }

    def probe(self) -> Probe:
        if importlib.util.find_spec("torch") is None:
            return Probe(reasons=(NO_TORCH,))
        info = cpu_info()
        details = {"threads": str(info.threads)}
        if info.features:
            details["instructions"] = ", ".join(info.features)
        found = find_library(info)
        details["kernels"] = found[0] if found else "torch's: none were built for this processor with the package"
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
        threads = None if text is None else int(text)
        found = _kernels(config)
        if found is None:
            return CpuBackend(config, threads)
        from .native.backend import NativeBackend
        from .native.library import Library

        try:
            library = Library(*found, threads or cpu_info().threads)
        except (ImportError, OSError) as error:
            raise DeviceError(
                f"The compiled kernels cannot be loaded: {error}. Or use --backend-option kernels=torch."
            ) from error
        return NativeBackend(config, library, threads)


def _kernels(config: BackendConfig) -> tuple[str, Path] | None:
    """(variant, file) of the compiled kernels, where they are to be used."""
    wanted = config.options.get("kernels")
    if wanted not in (None, "native", "torch"):
        raise ConfigError(f"kernels must be native or torch, not {wanted!r}.")
    quantization = config.options.get("quantization")
    if quantization not in (None, "int8", "int4"):
        raise ConfigError(f"--quantization must be int8 or int4, not {quantization!r}.")
    needed = "kernels=native" if wanted == "native" else f"--quantization {quantization}" if quantization else None
    if wanted == "torch" or "float64" in (config.dtype, config.kv_dtype):
        if needed:
            raise ConfigError(f"{needed} does not go with kernels=torch nor with float64: leave one of them out.")
        return None
    found = find_library(cpu_info())
    if found is None and needed:
        raise ConfigError(f"{needed} needs compiled kernels, and none were built with the package (is there g++?).")
    return found


@hookimpl
def octavo_backend() -> BackendFactory:
    return CpuFactory()
