"""Programs that are made after warm-up. There should be none: each stalls all requests for as long as it takes."""

from __future__ import annotations

import logging
import os

from .errors import ConfigError, OctavoError

logger = logging.getLogger(__name__)

VARIABLE = "OCTAVO_LATE_COMPILE"
"""Environment variable: "warn" (the default) counts and warns, "error" refuses, as Octavo's own tests do."""


class CompileAfterReadyError(OctavoError):
    """A step needed a program that was not prepared at warm-up; preparing it now would stall all requests."""


class LateCompiles:
    """Counts them.

    Attributes:
        count: programs made after warm-up.
        strict: whether one is an error.

    Raises:
        ConfigError: the environment variable has another value than the two.
    """

    def __init__(self) -> None:
        mode = os.environ.get(VARIABLE, "warn")
        if mode not in ("warn", "error"):
            raise ConfigError(f'{VARIABLE} must be "warn" or "error", not {mode!r}.')
        self.count = 0
        self.strict = mode == "error"

    def add(self, what: str, count: int = 1) -> None:
        """Counts programs, and warns.

        Args:
            what: what was, or is to be, compiled.

        Raises:
            CompileAfterReadyError: where `strict`.
        """
        self.count += count
        message = f"{what} after the engine was ready: all requests wait meanwhile. This is a bug of the backend."
        if self.strict:
            raise CompileAfterReadyError(message)
        logger.warning("%s Please report it.", message)
