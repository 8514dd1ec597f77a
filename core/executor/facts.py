"""What must be equal on all hosts before they start, and the sentence about what is not."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from dataclasses import fields
from typing import Any

import msgspec

from ..backend import API_VERSION
from ..config import EngineConfig, flag_of
from ..models.spec import ModelSpec

OWN = ("model", "tokenizer", "host_rank", "coordinator")
"""Options that may differ: paths, and how the coordinator is called from each host."""
LONGEST = 80  # characters of a value in a message


def facts(config: EngineConfig, device: str, model: ModelSpec) -> dict[str, Any]:
    """What this host is about to run, by names for people."""
    version = "unknown"
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("octavo")
    found: dict[str, Any] = {"Octavo's version": version, "the backend API's version": API_VERSION, "device": device}
    found |= {flag_of(f): getattr(config, f.name) for f in fields(config) if f.name not in OWN}
    found |= {f"the model's {f.name}": getattr(model, f.name) for f in fields(model)}
    # The way over the network makes lists of tuples.
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


def difference(mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> str:
    """A sentence about the first difference between rank 0 and another host; "" where there is none."""
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            here, there = (_short(values.get(name)) for values in (mine, theirs))
            return (
                f"Host {rank} differs from rank 0 in {name}: {there} on host {rank}, {here} on rank 0. Start all hosts "
                "with the same release, the same model and the same options."
            )
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
