"""Octavo serves large language models on any accelerator.

`LLM` and `SamplingParams` are loaded when they are first asked for, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.llm import LLM
    from .core.sampling.params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

try:
    __version__ = metadata.version("octavo")
except metadata.PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

_HOMES = {"LLM": ".core.llm", "SamplingParams": ".core.sampling.params"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
