"""The TPU backend: JAX on one host or several. With `platform=cpu` the same programs, but for the kernel,
run on JAX's CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...core.backend import Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from ...core.errors import ConfigError, DeviceError
from ...core.plugins import hookimpl
from ..host import host_memory
from .probe import find_chips, missing, unfit_libtpu

SIMULATED = "tpu:cpu"
PLATFORMS = ("tpu", "cpu")


class TpuFactory(BackendFactory):
    """Makes the TPU backend. It probes without importing JAX, whose start-up would take the chips."""

    name = "tpu"
    description = "JAX on Google's TPUs"
    auto_priority = 50
    multi_host = True
    options: ClassVar[Mapping[str, str]] = {
        "platform": "tpu, or cpu: the same programs, but for the kernel, on JAX's CPU, to try things without a TPU",
        "attention": "pallas, a kernel and the default on TPUs, or jnp, plain jax.numpy, which is what the CPU has",
        "tensor_parallel": "chips to split the model over, on all hosts together (default: one on each host)",
        "cpu_devices": "with platform=cpu: how many devices JAX makes of a host's CPU (default: as many as are needed)",
    }

    def probe(self) -> Probe:
        reasons = missing("jax")
        if reasons:
            return Probe(reasons=tuple(reasons))
        simulated = DeviceInfo(
            SIMULATED,
            "JAX on the CPU (simulated, for tests)",
            host_memory()[0],
            stands_in={"platform": "cpu"},
        )
        chips = find_chips()
        reasons = list(chips.reasons) or missing("libtpu")
        if reasons:
            return Probe((simulated,), tuple(reasons))
        details = {"chips": str(chips.count)}
        return Probe((DeviceInfo("tpu", chips.name, chips.memory_bytes, details), simulated), tuple(unfit_libtpu()))

    def create(self, config: BackendConfig) -> Backend:
        platform = config.options.get("platform", "cpu" if config.device == SIMULATED else "tpu")
        if platform not in PLATFORMS:
            raise ConfigError(f"platform must be one of {', '.join(PLATFORMS)}, not {platform!r}.")
        if (platform == "cpu") != (config.device == SIMULATED):
            raise ConfigError(
                f"platform={platform} contradicts --device {config.device}: leave one of the two out, or use "
                f"--device {SIMULATED if platform == 'cpu' else 'tpu'}."
            )
        if config.options.get("attention", "jnp") not in ("pallas", "jnp"):
            raise ConfigError(f"attention must be pallas or jnp, not {config.options['attention']!r}.")
        if platform == "cpu" and config.options.get("attention") == "pallas":
            raise ConfigError("attention=pallas needs a TPU: the kernel does not run on the CPU. Use attention=jnp.")
        hosts = config.hosts.count if config.hosts else 1
        tensor_parallel = _count(config, "tensor_parallel", hosts)
        if tensor_parallel % hosts:
            raise ConfigError(
                f"tensor_parallel={tensor_parallel} must be a multiple of --num-hosts {hosts}: each host has the same "
                f"number of chips."
            )
        cpu_devices = _count(config, "cpu_devices", tensor_parallel // hosts)
        if platform != "cpu" and "cpu_devices" in config.options:
            raise ConfigError("cpu_devices is for platform=cpu only: a TPU has the chips it has.")
        try:
            from .backend import TpuBackend
            from .platform import devices
        except ImportError as error:
            raise DeviceError(
                f"The TPU backend cannot be used: {error}. Install it with pip install 'octavo[tpu]'."
            ) from error
        return TpuBackend(config, devices(platform, tensor_parallel, cpu_devices, config.hosts))


def _count(config: BackendConfig, name: str, default: int) -> int:
    text = config.options.get(name, str(default))
    if not (text.isdecimal() and int(text) >= 1):
        raise ConfigError(f"{name} must be a whole number, at least 1, not {text!r}.")
    return int(text)


@hookimpl
def octavo_backend() -> BackendFactory:
    return TpuFactory()
