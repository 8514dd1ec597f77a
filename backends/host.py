"""Facts about the host's memory and processors, for backends whose device is the host. Standard library only."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) bytes of host memory that this process may use, control-group limits respected.

    Args:
        root: where proc/ and sys/ are looked for; tests give their own.
    """
    total, available = _machine_memory(root)
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return total, available


def _machine_memory(root: Path) -> tuple[int, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return _sysconf_memory()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024


def _sysconf_memory() -> tuple[int, int]:
    """What POSIX knows. macOS does not tell what is available; half of all is a guess that errs on the safe side."""
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page * total, page * os.sysconf("SC_AVPHYS_PAGES")
    return page * total, page * total // 2


def host_threads(root: Path = Path("/")) -> int:
    """Threads that are worth having: one for each core that this process may use, or fewer by a control group's quota.

    Two threads on one core share the units that compute, so a core's second hardware thread is not counted.

    Args:
        root: where proc/ and sys/ are looked for; tests give their own.
    """
    cores = len({_siblings(root, cpu) for cpu in usable_cpus()})
    quotas = [q for group, version in _groups(root, "cpu") if (q := _read_quota(group, version)) is not None]
    return max(min([cores, *(math.ceil(q) for q in quotas)]), 1)


def usable_cpus() -> list[int]:
    """The hardware threads that this process may run on, by the system's numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of a core, as the system writes them; only the one where it does not tell."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _read_quota(group: Path, version: int) -> float | None:
    """The processors that a control group may use, where it has a limit."""
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use) of each control group around this process that has a limit. Versions 1 and 2."""
    names = {1: _CGROUP_V1, 2: _CGROUP_V2}
    found = (_read_limits(group, *names[version]) for group, version in _groups(root, "memory"))
    return [limits for limits in found if limits is not None]


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The control groups around this process, (directory, version): a limit of a parent binds as well."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be the host's and not be visible; the mount point itself is then the container's
        # own group.
        group = base / path.strip("/")
        for directory in (group, *(p for p in group.parents if p == base or base in p.parents)):
            yield directory, version


def _read_limits(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> tuple[int, int] | None:
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / usage_name).read_text())
        statistics = dict(line.split(None, 1) for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # File pages that nobody uses are given back before the limit is felt.
    return int(limit), max(used - int(statistics.get(reclaimable_name, 0)), 0)
