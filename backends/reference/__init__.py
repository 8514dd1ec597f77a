"""The reference backend: NumPy only. The oracle for the others, a template, and a simulated static-shape device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import ConfigError
from ...core.plugins import hookimpl
from ..host import host_memory


class ReferenceFactory(BackendFactory):
    """Makes the reference backend; slow, and therefore never chosen by `--device auto`."""

    name = "reference"
    description = "NumPy on the host: slow and plain, for comparison and for writing backends"
    auto_priority = -1
    options: ClassVar[Mapping[str, str]] = {
        "static": "1 simulates an accelerator that takes only shapes declared and warmed up beforehand"
    }

    def probe(self) -> Probe:
        return Probe((DeviceInfo("reference", "NumPy on the host", host_memory()[0]),))

    def create(self, config: BackendConfig) -> Backend:
        from .backend import ReferenceBackend
        from .static import StaticReferenceBackend

        static = config.options.get("static", "0")
        if static not in ("0", "1"):
            raise ConfigError(f"static must be 0 or 1, not {static!r}.")
        return StaticReferenceBackend(config) if static == "1" else ReferenceBackend(config)


@hookimpl
def octavo_backend() -> BackendFactory:
    return ReferenceFactory()
