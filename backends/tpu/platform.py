"""Starting JAX: which platform, which devices, and where compiled programs are kept between runs."""

from __future__ import annotations

import os
from contextlib import suppress

import jax

from ...core.errors import ConfigError, DeviceError
from ...core.hub import cache_directory


def devices(platform: str, count: int, cpu_devices: int) -> list[jax.Device]:
    """The first `count` devices of a platform. JAX is started if it was not; it then has this platform only.

    Args:
        platform: "tpu" or "cpu".
        cpu_devices: devices that JAX makes of the CPU, if this starts it.

    Raises:
        DeviceError: JAX cannot start the platform, or was started without it.
        ConfigError: it has fewer devices.
    """
    _choose(platform, cpu_devices)
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"JAX cannot use the platform {platform!r}: {error}. Unset JAX_PLATFORMS if it is set; on a TPU host, see "
            f"that no other process holds the chips and that libtpu is the version that jax {jax.__version__} wants "
            f"(pip install -U 'octavo[tpu]')."
        ) from error
    if len(found) < count:
        more = f" or raise cpu_devices (it counts only before JAX starts) to {count}" if platform == "cpu" else ""
        raise ConfigError(
            f"tensor_parallel={count} needs {count} devices and there are {len(found)}: lower it to {len(found)}{more}."
        )
    return list(found[:count])


def _choose(platform: str, cpu_devices: int) -> None:
    """Settings that JAX reads when it starts. Once it runs they can no longer be changed, nor need they be."""
    if not jax.config.jax_platforms:
        # Without this JAX would start every platform it finds and, for the CPU, take the chips as well.
        jax.config.update("jax_platforms", platform)
    if platform == "cpu" and cpu_devices > max(1, jax.config.jax_num_cpu_devices):
        with suppress(RuntimeError):  # JAX runs already; too few devices are reported by the caller
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    if not jax.config.jax_compilation_cache_dir and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # JAX's key has the program, the compiler's version and its options and the device: it survives restarts.
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
