"""A device that computes nothing and answers at once: for measuring the core, and for tests of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import ConfigError
from ...core.plugins import hookimpl


class NullFactory(BackendFactory):
    """Makes the null backend; never chosen by `--device auto`."""

    name = "null"
    description = "Computes nothing, answers at once; measures the engine itself"
    auto_priority = -1
    options: ClassVar[Mapping[str, str]] = {
        "latency_ms": "how long a step pretends to take, in milliseconds (default 0)"
    }

    def probe(self) -> Probe:
        return Probe((DeviceInfo("null", "no device: tokens are made up"),))

    def create(self, config: BackendConfig) -> Backend:
        from .backend import NullBackend

        text = config.options.get("latency_ms", "0")
        try:
            latency = float(text)
        except ValueError:
            latency = -1.0
        if not 0.0 <= latency < float("inf"):
            raise ConfigError(f"latency_ms must be a number of milliseconds, at least 0, not {text!r}.")
        return NullBackend(config, latency / 1e3)


@hookimpl
def octavo_backend() -> BackendFactory:
    return NullFactory()
