"""Facts about the host's memory, for backends whose device is the host. Standard library only."""

from __future__ import annotations

import os
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


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use) of each control group around this process that has a limit. Versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", _CGROUP_V2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", _CGROUP_V1
        else:
            continue
        # A limit of a parent binds as well. In a container the path may be the host's and not be visible; the
        # mount point itself is then the container's own group.
        group = base / path.strip("/")
        for directory in (group, *(p for p in group.parents if p == base or base in p.parents)):
            limits = _read_limits(directory, *names)
            if limits is not None:
                found.append(limits)
    return found


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
