"""Discovery of backends: pluggy hooks behind the entry-point group `octavo.backends`, and the choice of a device."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from .backend import SUPPORTED_API_VERSIONS, Backend, BackendConfig, BackendFactory, DeviceInfo, Probe
from .errors import ConfigError, DeviceError

GROUP = "octavo.backends"

hookspec = pluggy.HookspecMarker("octavo")
hookimpl: Callable[..., Any] = pluggy.HookimplMarker("octavo")
"""Marks the hook in a plugin's module: `@hookimpl def octavo_backend() -> BackendFactory: ...`"""


class _Hooks:
    @hookspec
    def octavo_backend(self) -> BackendFactory:  # type: ignore[empty-body]
        """The backend that a plugin brings."""


@dataclass(frozen=True)
class Found:
    """One installed plugin, usable or not.

    Attributes:
        name: the factory's name, or the entry point's where no factory could be had.
        factory: None when the plugin could not be loaded.
        probe: the devices it found, or the reasons why there are none.
        package: the distribution it came with, "octavo 0.1.0" for example.
    """

    name: str
    factory: BackendFactory | None
    probe: Probe
    package: str = ""


def _load(manager: pluggy.PluginManager, entry: importlib.metadata.EntryPoint) -> BackendFactory:
    """Loads one plugin.

    Raises:
        DeviceError: it cannot be used; the message is the reason.
    """
    try:
        module = entry.load()
        manager.register(module, name=entry.name)
        caller = manager.subset_hook_caller("octavo_backend", [p for p in manager.get_plugins() if p is not module])
        factories = caller()
    except Exception as error:  # a stranger's module may raise anything at all
        raise DeviceError(f"the plugin could not be loaded: {type(error).__name__}: {error}") from error
    if len(factories) != 1 or not isinstance(factories[0], BackendFactory):
        raise DeviceError(f"{entry.value} has no octavo_backend hook that returns a BackendFactory.")
    factory = factories[0]
    if factory.api_version not in SUPPORTED_API_VERSIONS:
        supported = " and ".join(str(v) for v in SUPPORTED_API_VERSIONS)
        raise DeviceError(
            f"the plugin was written for backend API {factory.api_version}, this Octavo supports {supported}: "
            f"install a release of the plugin that matches."
        )
    return factory


def discover() -> list[Found]:
    """Loads and probes every installed plugin; one that fails is listed with its reason."""
    manager = pluggy.PluginManager("octavo")
    manager.add_hookspecs(_Hooks)
    found = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
        try:
            factory = _load(manager, entry)
        except DeviceError as error:
            found.append(Found(entry.name, None, Probe(reasons=(str(error),)), package))
            continue
        try:
            probe = factory.probe()
        except Exception as error:  # a probe must not raise, but a stranger's may
            probe = Probe(reasons=(f"the probe failed: {type(error).__name__}: {error}",))
        found.append(Found(factory.name, factory, probe, package))
    return found


def select(device: str = "auto", options: Mapping[str, str] | None = None) -> tuple[BackendFactory, DeviceInfo]:
    """The factory and the device for `--device`.

    Args:
        device: "auto", a factory's name ("cuda": its first device) or a device's id ("cuda:1").
        options: the backend options given; those that a simulated device names in `stands_in` choose it.

    Raises:
        DeviceError: there is no such device; the message explains probe by probe.
    """
    found = discover()
    if device == "auto":
        usable = [f for f in found if f.factory and _real(f) and f.factory.auto_priority >= 0]
        if usable:
            best = max(usable, key=lambda f: f.factory.auto_priority if f.factory else -1)
            assert best.factory is not None
            return best.factory, _real(best)[0]
        raise DeviceError("No device was found.\n" + _explain(found))
    for plugin in found:
        if plugin.factory is None:
            continue
        named = _asked_for(plugin, options or {}) or _real(plugin)
        if device == plugin.name and named:
            return plugin.factory, named[0]
        for info in plugin.probe.devices:
            if device == info.id and device != plugin.name:
                return plugin.factory, info
    name = device.partition(":")[0]
    same = [f for f in found if f.name == name]
    if not same:
        names = ", ".join(f.name for f in found) or "none"
        raise DeviceError(
            f"There is no device {device!r}: no installed plugin has that name (installed: {names}). "
            f"Run `octavo devices` to see them, or install the plugin for it."
        )
    if any(_real(f) for f in same):
        ids = ", ".join(info.id for f in same for info in f.probe.devices)
        raise DeviceError(f"There is no device {device!r}; {name} has {ids}.")
    raise DeviceError(f"Device {device!r} cannot be used.\n" + _explain(same))


def _real(plugin: Found) -> list[DeviceInfo]:
    """The devices that are what the plugin is for."""
    return [info for info in plugin.probe.devices if not info.stands_in]


def _asked_for(plugin: Found, options: Mapping[str, str]) -> list[DeviceInfo]:
    """The simulated devices that these options ask for."""
    return [d for d in plugin.probe.devices if d.stands_in and d.stands_in.items() <= options.items()]


def create(factory: BackendFactory, config: BackendConfig) -> Backend:
    """Makes the backend, after checking that it knows every option given.

    Raises:
        ConfigError: a `--backend-option` is unknown to it.
        DeviceError: the device cannot be used after all.
    """
    unknown = sorted(set(config.options) - set(factory.options))
    if unknown:
        known = "; ".join(f"{k}: {v}" for k, v in factory.options.items()) or "none"
        raise ConfigError(f"{factory.name} has no option {', '.join(unknown)}. Its options: {known}.")
    return factory.create(config)


def _explain(found: list[Found]) -> str:
    lines = []
    for plugin in found:
        for reason in plugin.probe.reasons or ("no device was found.",):
            lines.append(f"  {plugin.name}: {reason}")
        lines += [f"  {plugin.name}: --device {d.id} is {d.name}." for d in plugin.probe.devices if d.stands_in]
    return "\n".join(lines) or "  No backend plugin is installed."
