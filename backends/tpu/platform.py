"""Starting JAX: which platform, which devices, and where compiled programs are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import jax

from ...core.backend import Hosts
from ...core.errors import ConfigError, DeviceError
from ...core.hub import cache_directory

SHUTDOWN = 5
"""Seconds that JAX waits, when it leaves the coordinator, for others to leave."""


def devices(platform: str, count: int, cpu_devices: int, hosts: Hosts | None = None) -> list[jax.Device]:
    """The first `count` devices of a platform: with several hosts the same number on each, host by host.

    JAX is started if it was not; it then has this platform only. With several hosts this waits for the others.

    Args:
        platform: "tpu" or "cpu".
        count: devices in all, a multiple of the number of hosts.
        cpu_devices: devices that JAX makes of this host's CPU, if this starts it.
        hosts: the hosts, or None for this one alone.

    Raises:
        DeviceError: JAX cannot start the platform, or was started without it, or without the other hosts.
        ConfigError: it has fewer devices.
    """
    _choose(platform, cpu_devices)
    if hosts:
        _join_hosts(platform, hosts)
    try:
        found = jax.devices(platform) if hosts else jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"JAX cannot use the platform {platform!r}: {error}. Unset JAX_PLATFORMS if it is set; on a TPU host, see "
            f"that no other process holds the chips and that libtpu is the version that jax {jax.__version__} wants "
            f"(pip install -U 'octavo[tpu]')."
        ) from error
    if hosts:
        return _of_each_host(found, count, hosts)
    if len(found) < count:
        more = f" or raise cpu_devices (it counts only before JAX starts) to {count}" if platform == "cpu" else ""
        raise ConfigError(
            f"tensor_parallel={count} needs {count} devices and there are {len(found)}: lower it to {len(found)}{more}."
        )
    return list(found[:count])


def _of_each_host(found: Sequence[jax.Device], count: int, hosts: Hosts) -> list[jax.Device]:
    """The first devices of each host; every host finds the same list."""
    by_host: dict[int, list[jax.Device]] = {}
    for device in sorted(found, key=lambda d: (d.process_index, d.id)):
        by_host.setdefault(device.process_index, []).append(device)
    each = count // hosts.count
    least = min(map(len, by_host.values()))
    if len(by_host) != hosts.count or least < each:
        raise ConfigError(
            f"tensor_parallel={count} over {hosts.count} hosts needs {each} devices on each; JAX found "
            f"{len(by_host)} hosts with at least {least}."
        )
    return [device for own in by_host.values() for device in own[:each]]


def _join_hosts(platform: str, hosts: Hosts) -> None:
    """Makes this process one of several under JAX's coordinator; every one of them then sees all devices."""
    # Octavo watches the hosts itself (core/executor): JAX would end the process, without a word to its clients.
    jax.config.update("jax_enable_recoverability", True)
    # JAX would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(hosts.coordinator, hosts.count, hosts.rank, shutdown_timeout_seconds=SHUTDOWN)
    except RuntimeError as error:
        raise DeviceError(
            f"JAX cannot join the hosts at {hosts.coordinator}: {error}. See that the port is free on rank 0 and "
            f"can be reached from all hosts. A process can do this once, before it uses JAX in any other way."
        ) from error


def leave_hosts() -> None:
    """Leaves JAX's coordinator."""
    jax.distributed.shutdown()


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
