"""What this host knows about TPUs, read from files: no library is loaded and no chip is opened."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

# PCI vendor Google, and its TPUs: name and HBM of one chip in GiB (0 where one id has several sizes). The vendor
# alone says nothing: Google's network cards have it as well. Ids as in jax/_src/hardware_utils.py.
_VENDOR = "0x1ae0"
_CHIPS = {
    "0x0027": ("TPU v2 or v3", 0),
    "0x005e": ("TPU v4", 32),
    "0x0062": ("TPU v5p", 95),
    "0x0063": ("TPU v5e", 16),
    "0x006f": ("TPU v6e", 32),
    "0x0076": ("TPU7x", 192),
}
_INSTALL = {
    "jax": "it needs JAX, which is not installed: pip install 'octavo[tpu]'",
    "libtpu": "it needs libtpu, which is not installed: pip install 'octavo[tpu]'",
}


@dataclass(frozen=True)
class Chips:
    """The TPU chips of a host.

    Attributes:
        count: how many; 0 where there is a reason why not.
        name: their kind, for a person.
        memory_bytes: HBM of one chip, 0 where unknown.
        reasons: why they cannot be used, a sentence each.
    """

    count: int = 0
    name: str = ""
    memory_bytes: int = 0
    reasons: tuple[str, ...] = ()


def missing(package: str) -> list[str]:
    """[how to install it] where a package is not installed."""
    return [] if importlib.util.find_spec(package) else [_INSTALL[package]]


def unfit_libtpu() -> list[str]:
    """[what is wrong] where libtpu is not the version that the installed JAX asks for."""
    for requirement in importlib.metadata.requires("jax") or []:
        wanted = re.match(r"libtpu\s*==\s*([\d.]+)", requirement)
        have = importlib.metadata.version("libtpu")
        if wanted and not f"{have}.".startswith(wanted[1].rstrip(".") + "."):
            return [f"libtpu is {have}, and this JAX wants {wanted[1]}*: pip install -U 'octavo[tpu]'"]
    return []


def find_chips(root: Path = Path("/")) -> Chips:
    """The chips, or why there are none to use.

    Args:
        root: where dev/, sys/, proc/ and tmp/ are looked for; tests give their own.
    """
    kinds = [kind for path in sorted(root.glob("sys/bus/pci/devices/*")) if (kind := _kind(path))]
    nodes = [*root.glob("dev/accel*"), *(p for p in root.glob("dev/vfio/*") if p.name.isdecimal())]
    if not kinds:
        return Chips(reasons=("this host has no TPU chip: no PCI device of a known TPU was found.",))
    if not nodes:
        return Chips(
            reasons=(
                f"this host has {len(kinds)} {kinds[0][0]} chips, but neither /dev/accel* nor /dev/vfio/* to reach "
                f"them: give the container the devices (docker run --privileged, or a TPU resource in Kubernetes).",
            )
        )
    holder = _lock_holder(root)
    if holder:
        return Chips(reasons=(f"another process holds the TPU ({holder}): end it, or wait until it has ended.",))
    name, gib = kinds[0]
    return Chips(len(kinds), name, gib << 30)


def _kind(device: Path) -> tuple[str, int] | None:
    """Name and GiB of a PCI device that is a TPU."""
    try:
        if (device / "vendor").read_text().strip() != _VENDOR:
            return None
        return _CHIPS.get((device / "device").read_text().strip())
    except OSError:
        return None


def _lock_holder(root: Path) -> str:
    """Who holds libtpu's lock file, as "process 17", or "" where nobody does.

    The file outlives its process, so its presence says nothing; the kernel's list of locks does. To try the lock
    would be a side effect that another process could trip over.
    """
    try:
        lock = os.stat(root / "tmp/libtpu_lockfile")
        lines = (root / "proc/locks").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF"; a waiting process has "->" after the number.
        if wanted in fields and "->" not in fields:
            pid = fields[fields.index(wanted) - 1]
            return f"process {pid}" if pid != str(os.getpid()) else ""
    return ""
