"""EngineConfig's fields as command-line options: the one source is `core/config.py`, nothing is listed here."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any

import typer

from ..core.config import EngineConfig, flag_of

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """A number of bytes: "4GiB", "512MB", "1.5TiB" or a plain number.

    Raises:
        typer.BadParameter: it is none of these. A bare "4G" is refused, since it is read both ways in the world.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        hint = f" Write {match[1]}{match[2]}iB (powers of 1024) or {match[1]}{match[2]}B." if match else ""
        if match is None or match[2].upper() not in ("K", "M", "G", "T"):
            hint = " Write bytes as a number, or with a unit: 512MB, 4GiB."
        raise typer.BadParameter(f"{text!r} is not a number of bytes.{hint}")
    unit = _UNITS[match[2].upper()]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_pairs(pairs: list[str], flag: str) -> dict[str, str]:
    """["a=1", "b=x=y"] → {"a": "1", "b": "x=y"}.

    Raises:
        typer.BadParameter: one is not key=value, or a key comes twice with different values.
    """
    out: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{flag} takes key=value, not {pair!r}.")
        if out.get(key, value) != value:
            raise typer.BadParameter(f"{flag} {key} is given twice, as {out[key]!r} and as {value!r}.")
        out[key] = value
    return out


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _plain(hint: Any) -> tuple[Any, bool]:
    """A field's type without None, and whether it had None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(hint))
    return hint, False


def _choices(name: str, choices: Sequence[str]) -> type[Enum]:
    make: Any = Enum  # made of data, which mypy cannot follow
    return make(name, {choice: choice for choice in choices})


def _parameter(f: Field[Any], hint: Any) -> inspect.Parameter:
    """The parameter that typer makes an option (or, for `model`, the argument) of."""
    plain, optional = _plain(hint)
    text, default, low = f.metadata["help"], _default(f), f.metadata.get("low")
    annotation: Any = plain
    info: Any
    if f.name == "model":
        info, annotation = typer.Argument(default, help=text, metavar="MODEL", show_default=False), str
        optional = True
    elif f.metadata.get("choices"):
        annotation = _choices(f.name, f.metadata["choices"])
        info = typer.Option(None if optional else annotation(default), flag_of(f), help=text)
    elif plain is bool:
        info = typer.Option(default, f"{flag_of(f)}/--no-{flag_of(f)[2:]}", help=text)
    elif typing.get_origin(plain) is Mapping:
        info, annotation, optional = typer.Option([], flag_of(f), help=text, metavar="KEY=VALUE"), list[str], False
    elif f.metadata.get("unit") == "bytes":
        info = typer.Option(default, flag_of(f), help=text, metavar="BYTES", parser=parse_bytes)
    else:
        info = typer.Option(default, flag_of(f), help=text, min=low)
    if optional:
        annotation = annotation | None
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


def engine_parameters() -> list[inspect.Parameter]:
    """One parameter for each field of EngineConfig."""
    hints = typing.get_type_hints(EngineConfig)
    return [_parameter(f, hints[f.name]) for f in fields(EngineConfig)]


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration for what typer parsed."""
    out = {}
    for f in fields(EngineConfig):
        value = values[f.name]
        if isinstance(value, Enum):
            value = value.value
        elif isinstance(value, list):
            value = parse_pairs(value, flag_of(f))
        out[f.name] = value
    return EngineConfig(**out)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a typer command every engine option in place of its parameter `config: EngineConfig`."""
    hints = typing.get_type_hints(command)
    own = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(command).parameters.values()
        if p.name != "config"
    ]
    engine = engine_parameters()
    taken = {p.name for p in own}
    engine = [p for p in engine if p.name not in taken]

    def wrapper(**values: Any) -> None:
        given = {p.name: values.pop(p.name) for p in engine}
        missing = {f.name: _default(f) for f in fields(EngineConfig) if f.name not in given}
        command(config=engine_config({**missing, **given}), **values)

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    parameters = [*own, *engine]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
