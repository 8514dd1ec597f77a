"""The package list, the entry points, and what importing costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parent
NOT_PACKAGES = {"tests", "benchmarks", "ci", "docs", "build", "examples"}


def test_every_package_is_listed() -> None:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"octavo"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and parts[0] not in NOT_PACKAGES and not parts[0].startswith("."):
            found.add(".".join(("octavo", *parts)))
    assert sorted(listed) == sorted(found)


def test_our_backends_come_through_entry_points() -> None:
    names = {entry.name for entry in importlib.metadata.entry_points(group="octavo.backends")}
    assert {"cpu", "mps", "null", "reference", "tpu"} <= names


def test_importing_octavo_loads_no_array_library_but_numpy() -> None:
    code = "import sys, octavo; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "jax", "transformers", "fastapi"):
        assert f"'{heavy}'" not in loaded
