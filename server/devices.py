"""`octavo devices`: what each plugin found."""

from __future__ import annotations

import json
from typing import Any

from ..core.plugins import Found, discover


def show(as_json: bool) -> None:
    """Prints every installed plugin with its devices, and with its reasons where it has none."""
    found = discover()
    if as_json:
        print(json.dumps([_as_dict(plugin) for plugin in found], indent=2))
        return
    if not found:
        print("No backend plugin is installed. Reinstall Octavo, or install a plugin package for your device.")
        return
    rows = [("PLUGIN", "DEVICE", "MEMORY", "WHAT IT IS")]
    for plugin in found:
        rows += [
            (plugin.name, device.id, _gib(device.memory_bytes), "; ".join([device.name, *_details(device.details)]))
            for device in plugin.probe.devices
        ] or [(plugin.name, "-", "-", plugin.factory.description if plugin.factory else "")]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    for plugin in found:
        for reason in plugin.probe.reasons:
            print(f"{plugin.name}: {reason}")


def _details(details: Any) -> list[str]:
    return [f"{key} {value}" for key, value in details.items()]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "-"


def _as_dict(plugin: Found) -> dict[str, Any]:
    return {
        "plugin": plugin.name,
        "package": plugin.package,
        "description": plugin.factory.description if plugin.factory else "",
        "api_version": plugin.factory.api_version if plugin.factory else None,
        "devices": [
            {"id": d.id, "name": d.name, "memory_bytes": d.memory_bytes, "details": dict(d.details)}
            for d in plugin.probe.devices
        ],
        "reasons": list(plugin.probe.reasons),
    }
