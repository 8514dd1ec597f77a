"""Typed reading of a model's configuration (config.json, or GGUF metadata in the same spelling)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError

_REQUIRED: Any = object()
MAX_DIMENSION = 1 << 31  # beyond any model; keeps a damaged file from asking for absurd tables


class Config:
    """A JSON object whose fields are read with a type, a range and a clear error.

    A field that is null counts as absent: config.json files use both for "not set".

    Attributes:
        data: the fields; `defaults` stand in for those that are missing.
        where: the file, for messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {**(defaults or {}), **data}
        self.where = where

    def error(self, key: str, what: str) -> ModelError:
        """The error that says what is wrong with one field."""
        return ModelError(f"{self.where}: {key} {what}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(key, "is missing; without it the model's shape is not known. Get the file again")
        return default

    def count(self, key: str, default: Any = _REQUIRED, *, high: int = MAX_DIMENSION) -> int:
        """A positive whole number, such as a width."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise self.error(key, f"is {value!r}, but a whole number from 1 to {high} is needed")
        return value

    def optional_count(self, key: str, *, high: int = MAX_DIMENSION) -> int | None:
        """A positive whole number, or None where the field is absent."""
        return None if self.data.get(key) is None else self.count(key, high=high)

    def number(self, key: str, default: Any = _REQUIRED, *, low: float | None = None) -> float:
        """A finite number: above 0, or not below `low` where that is given."""
        value = self._get(key, default)
        fits = not isinstance(value, bool) and isinstance(value, (int, float))
        if fits:
            try:
                value = float(value)
            except OverflowError:
                fits = False
        if not fits or not math.isfinite(value) or (value <= 0 if low is None else value < low):
            raise self.error(key, f"is {value!r}, but a number {'above 0' if low is None else f'from {low}'} is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, but true or false is needed")
        return value

    def section(self, key: str) -> Config | None:
        """A nested object, or None where it is absent or empty."""
        value = self.data.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}, but an object is needed")
        return Config(value, f"{self.where}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids, written as one number or a list; empty where the field is absent."""
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_DIMENSION for i in ids):
            raise self.error(key, f"is {value!r}, but a token id or a list of them is needed")
        return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); get the file again.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, but a JSON object is needed; get the file again.")
    return data
