"""Discovery: plugins of strangers that work, break, or are too old; the choice of a device; what errors advise."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from octavo.core import plugins
from octavo.core.backend import API_VERSION, BackendConfig, BackendFactory, DeviceInfo, Probe
from octavo.core.errors import ConfigError, DeviceError

MISSING = object()


class Factory(BackendFactory):
    """A stranger's factory."""

    options = {"speed": "how fast"}  # noqa: RUF012

    def __init__(self, name, devices=(), reasons=(), priority=0, api_version=API_VERSION, probe_error=None):
        self.name, self.auto_priority, self.api_version = name, priority, api_version
        self._probe, self._error = Probe(tuple(devices), tuple(reasons)), probe_error

    def probe(self):
        if self._error:
            raise self._error
        return self._probe

    def create(self, config):
        return ("created", self.name, config.device)


@pytest.fixture
def install(monkeypatch):
    """Installs plugins: name → a factory, None for a module without a hook, or MISSING for none to import."""

    def put(**given):
        entries = []
        for name, what in given.items():
            module = types.ModuleType(f"fake_plugin_{name}")
            if what is not None:
                module.octavo_backend = plugins.hookimpl(lambda what=what: what)
            if what is not MISSING:
                monkeypatch.setitem(sys.modules, module.__name__, module)
            entries.append(importlib.metadata.EntryPoint(name, module.__name__, plugins.GROUP))
        monkeypatch.setattr(plugins.importlib.metadata, "entry_points", lambda group: entries)

    return put


def device(name, number=0):
    return DeviceInfo(f"{name}:{number}", f"Card {number}")


def test_auto_takes_the_highest_priority_that_has_a_device(install):
    install(
        slow=Factory("slow", [device("slow")], priority=10),
        fast=Factory("fast", [device("fast"), device("fast", 1)], priority=100),
        gone=Factory("gone", reasons=["no driver"], priority=200),
        never=Factory("never", [device("never")], priority=-1),
    )
    factory, info = plugins.select("auto")
    assert (factory.name, info.id) == ("fast", "fast:0")
    assert plugins.select("fast")[1].id == "fast:0"
    assert plugins.select("fast:1")[1].id == "fast:1"
    assert plugins.select("never")[1].id == "never:0"


def test_a_device_that_cannot_be_used_is_explained(install):
    install(gone=Factory("gone", reasons=["the driver is missing: install it"]), ok=Factory("ok", [device("ok")]))
    with pytest.raises(DeviceError, match="gone: the driver is missing: install it"):
        plugins.select("gone")
    with pytest.raises(DeviceError, match="ok has ok:0"):
        plugins.select("ok:7")
    with pytest.raises(DeviceError, match=r"no installed plugin has that name \(installed: gone, ok\)"):
        plugins.select("other")


def test_without_any_device_every_probe_is_explained(install):
    install(a=Factory("a", reasons=["no card"]), b=Factory("b"))
    with pytest.raises(DeviceError, match=r"(?s)a: no card.*b: no device was found"):
        plugins.select()


def test_a_broken_plugin_harms_nobody_and_says_why(install):
    install(
        broken=MISSING,
        empty=None,
        old=Factory("old", [device("old")], api_version=API_VERSION + 7),
        raises=Factory("raises", probe_error=OSError("bus error")),
        ok=Factory("ok", [device("ok")]),
    )
    found = {f.name: f for f in plugins.discover()}
    assert found["ok"].probe.devices
    reasons = {name: " ".join(f.probe.reasons) for name, f in found.items()}
    assert "could not be loaded: ModuleNotFoundError" in reasons["broken"]
    assert "no octavo_backend hook" in reasons["empty"]
    assert f"written for backend API {API_VERSION + 7}, this Octavo supports {API_VERSION}" in reasons["old"]
    assert "the probe failed: OSError: bus error" in reasons["raises"]
    assert plugins.select()[0].name == "ok"
    with pytest.raises(DeviceError, match="written for backend API"):
        plugins.select("old")


def test_unknown_options_are_refused_with_the_known_ones(install):
    factory = Factory("ok", [device("ok")])
    assert plugins.create(factory, BackendConfig("ok:0", options={"speed": "1"})) == ("created", "ok", "ok:0")
    with pytest.raises(ConfigError, match=r"ok has no option sped. Its options: speed: how fast"):
        plugins.create(factory, BackendConfig("ok:0", options={"sped": "1"}))
