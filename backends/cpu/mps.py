"""Apple Silicon: the torch runtime on Metal."""

from __future__ import annotations

import importlib.util
import platform

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import DeviceError
from ...core.plugins import hookimpl
from ..host import host_memory
from . import NO_TORCH


class MpsFactory(BackendFactory):
    """Makes the backend for the GPU of a Mac with Apple Silicon."""

    name = "mps"
    description = "torch on the GPU of Apple Silicon"
    auto_priority = 20

    def probe(self) -> Probe:
        reason = _unavailable()
        if reason:
            return Probe(reasons=(reason,))
        return Probe((DeviceInfo("mps", f"Apple {platform.machine()} GPU", host_memory()[0]),))

    def create(self, config: BackendConfig) -> Backend:
        reason = _unavailable()
        if reason:
            raise DeviceError(f"The mps backend cannot be used: {reason}")
        from .mps_backend import MpsBackend

        return MpsBackend(config)


def _unavailable() -> str | None:
    """Why the device cannot be used, or None. torch is imported only on machines that may have one."""
    if platform.system() != "Darwin":
        return f"it needs macOS on Apple Silicon; this is {platform.system()}."
    if platform.machine() != "arm64":
        return f"it needs Apple Silicon; this Mac has {platform.machine()}. Use --device cpu."
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    import torch

    if not torch.backends.mps.is_built():
        return "the installed torch was built without Metal: pip install --force-reinstall torch"
    if not torch.backends.mps.is_available():
        return "torch finds no Metal device: it needs macOS 14 or later, and no virtual machine without a GPU."
    return None


@hookimpl
def octavo_backend() -> BackendFactory:
    return MpsFactory()
