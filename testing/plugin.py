"""A pytest plugin: `--octavo-device` and the fixture `kit`. Load it with `-p octavo.testing.plugin`."""

from __future__ import annotations

import pytest

from ..core import plugins
from .kit import DeviceCase, Kit

# One thread: small cases gain nothing from more, and test runners share their processors.
DEFAULT_DEVICES = (
    "reference/float32",
    "reference/float64",
    "reference/float32/static=1",
    "cpu/float32/threads=1",
    "cpu/float32/threads=1/kernels=torch",
    "cpu/bfloat16/threads=1/kernels=torch",
    "cpu/float64/threads=1",
    "cpu/bfloat16/threads=1",
    "cpu/float16/threads=1",
    "tpu/float32/platform=cpu",
)
# Compiled programs make these take minutes: they are marked `slow`.
SLOW_DEVICES = ("tpu/bfloat16/platform=cpu", "tpu/float32/platform=cpu/tensor_parallel=2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--octavo-device",
        action="append",
        metavar="DEVICE[/DTYPE][/OPTION=VALUE]",
        help="device for the conformance tests; may be repeated, or a list with commas",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kit" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--octavo-device")
    if asked:
        names = [name for value in asked for name in value.split(",")]
    else:
        usable = {found.name for found in plugins.discover() if found.probe.devices}
        names = [name for name in (*DEFAULT_DEVICES, *SLOW_DEVICES) if DeviceCase.parse(name).device in usable]
    cases = [
        pytest.param(DeviceCase.parse(name), marks=[pytest.mark.slow] if name in SLOW_DEVICES else [], id=name)
        for name in names
    ]
    metafunc.parametrize("kit", cases, indirect=True, scope="session")


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Kit:
    """The device under test."""
    return Kit(request.param)
