"""The model families that Octavo knows: one small declaration each."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ModelError
from .base import Family
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2

__all__ = ["FAMILIES", "Family", "family_for", "family_for_gguf"]

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2)


def family_for(architectures: Sequence[str], where: str = "config.json") -> Family:
    """The family that covers one of the names in config.json's "architectures".

    Raises:
        ModelError: none does; the message lists those that are supported.
    """
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    named = ", ".join(map(str, architectures)) or "none"
    raise ModelError(f"{where}: no supported architecture (it names {named}). Supported: {supported}.")


def family_for_gguf(arch: str, where: str) -> Family:
    """The family of a GGUF file's "general.architecture".

    Raises:
        ModelError: no family covers it; the message lists those that are supported.
    """
    for family in FAMILIES:
        if family.gguf_arch == arch:
            return family
    supported = ", ".join(family.gguf_arch for family in FAMILIES if family.gguf_arch)
    raise ModelError(f"{where}: the GGUF architecture {arch!r} is not supported. Supported: {supported}.")
