"""The installed version."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Octavo's version, "unknown" where it runs from a checkout that was not installed."""
    try:
        return importlib.metadata.version("octavo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
